"""File names, checksums and download addresses of the data sets."""

#: Checksums of every file, by data set and name. MNIST's files may be gzipped or plain.
FILES: dict[str, dict[str, str]] = {
    "mnist": {
        "train-images-idx3-ubyte.gz": "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "train-labels-idx1-ubyte.gz": "sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "t10k-images-idx3-ubyte.gz": "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "t10k-labels-idx1-ubyte.gz": "sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        "train-images-idx3-ubyte": "sha256:ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "train-labels-idx1-ubyte": "sha256:65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "t10k-images-idx3-ubyte": "sha256:0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "t10k-labels-idx1-ubyte": "sha256:ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    },
    "cifar10": {
        "data_batch_1.bin": "sha256:cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
        "data_batch_2.bin": "sha256:a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
        "data_batch_3.bin": "sha256:bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
        "data_batch_4.bin": "sha256:014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
        "data_batch_5.bin": "sha256:755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
        "test_batch.bin": "sha256:8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
        # the published MD5; its members have SHA-256 sums above
        "cifar-10-binary.tar.gz": "md5:c32a1d4ab5d03f1284b67883e8d87530",
    },
    "wikitext2": {
        "train.txt": "sha256:9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
        "valid.txt": "sha256:f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
        "test.txt": "sha256:d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
    },
    "books": {
        "train.txt": "sha256:5d2ac3c6a52ddc0cb6b38ab4e3af2569bfdafd63cfee36e731639205e41fb875",
        "valid.txt": "sha256:47765932610eebf1aa1448b640ca90a3a04c3ac7da9d748dbc917501334fb0d6",
    },
    "multi30k": {
        "train.lc.norm.tok.de": "sha256:cb5a23529b65ec2061f1dc446192a9c37382b63cc75f81a0be59d34894b3a505",
        "train.lc.norm.tok.en": "sha256:08925f8e0572bcd5a006702fc5fe20e2d77c6917d4eebd576fc20de6693c2119",
        "val.lc.norm.tok.de": "sha256:97232bd273eceb7207f689527386a97e4be2616b18ada47576bdaf96c8ae1f00",
        "val.lc.norm.tok.en": "sha256:46573ce391ae227f1c72f873392436a20ef18e0a6d518098cfbd70b77c8572ec",
        "test_2016_flickr.lc.norm.tok.de": "sha256:c6a33d39d48f9f510de147651316cd9d918e09ad0219df734a2f16b6baccacc4",
        "test_2016_flickr.lc.norm.tok.en": "sha256:5b7f32627cf99eced828311b955dae9800bb52bc8b91cf8b6526829e605b29d2",
        # raw files, after unpacking
        "train.de": "sha256:2c2b73fd2b548fbcde3a875e0a78d6ee94d498bfdee6bd3eae3945779e9ddf72",
        "train.en": "sha256:460a15fbd157e34a7a9957ee388c1ca247fe47af3ef25fb50442af6c274e0fc6",
        "val.de": "sha256:660e09eb7e1da2f856ea13ee5ad3cf6d36b3d5b0b733c857e94c5747a3dfc660",
        "val.en": "sha256:1f2a23d992769b5b3d209b0a10dd0b77c08cceb1f20dfb97ed0aafa49d107227",
        "test_2016_flickr.de": "sha256:4be6b5b3236b79c25475c6bb829800a7ce559e9ba7a1f6c2394fe4d40be46d16",
        "test_2016_flickr.en": "sha256:399a4382932c1aadd3ceb9bef1008d388a64c76d4ae4e9d4728c6f4301cac182",
    },
}

#: A larger file is refused, whether it is downloaded or unpacked. The largest, of classic-books, unpacks to 331 MB.
MAX_FILE_BYTES = 2**30

#: MNIST's files without ".gz": images, labels.
MNIST_TRAIN = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
MNIST_TEST = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
CIFAR10_ARCHIVE = "cifar-10-binary.tar.gz"
CIFAR10_TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
CIFAR10_TEST = "test_batch.bin"
#: Training, validation and test text.
WIKITEXT2 = ("train.txt", "valid.txt", "test.txt")
#: Training and validation text of classic-books, and the archive and commit that they are built from.
BOOKS = ("train.txt", "valid.txt")
BOOKS_ARCHIVE = "classic-books-markdown.tar.gz"
BOOKS_COMMIT = "944882722e9a96fa6cf2739dc2ea757e101f412f"
#: Training, validation and test sentences, in German and English: lower-cased, normalised, tokenised by the authors.
MULTI30K = tuple((f"{part}.lc.norm.tok.de", f"{part}.lc.norm.tok.en") for part in ("train", "val", "test_2016_flickr"))
#: Raw files without ".gz", by the names of the tokenised ones.
MULTI30K_RAW = {name: name.replace(".lc.norm.tok", "") for pair in MULTI30K for name in pair}

#: Subfolder of the data folder, by data set.
FOLDERS = {
    "mnist": "mnist",
    "cifar10": "cifar-10-batches-bin",
    "wikitext2": "wikitext-2",
    "multi30k": "multi30k/tok",
    "books": "classic-books",
}

#: Subfolders that are searched for Multi30k's raw files, in order.
RAW_FOLDERS = ("multi30k/raw", "multi30k", "multi30k/tok", "")

#: Data sets with file names so generic that they are only searched for in their own subfolder.
GENERIC_NAMES = ("wikitext2", "books")

#: Base URLs of each data set, in the order in which they are tried.
MIRRORS: dict[str, tuple[str, ...]] = {
    "mnist": ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
    "cifar10": ("https://www.cs.toronto.edu/~kriz/",),
    # the copy of PyTorch's examples; the original host is gone
    "wikitext2": ("https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2/",),
    "multi30k": ("https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/tok/",),
    "books": ("https://codeload.github.com/mlschmitt/classic-books-markdown/tar.gz/",),
}
