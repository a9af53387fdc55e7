"""Roles of whole architectures of transformers, timm, torchvision and diffusers, against a reviewed table.

Each section of tests/data/roles.txt is an architecture, which is built from its configuration on the meta device.
``PYTHONPATH=tests python tests/core/test_roles_libraries.py`` writes the sections anew, for the libraries that are
installed: read the difference, and the code of each new layer.
"""

import re
import warnings
from pathlib import Path

import pytest
import torch
from networks import declare_operators_of_torchvision

from nero.roles import roles_of

TABLE = Path(__file__).parents[1] / "data" / "roles.txt"
SECTIONS = re.split(r"^\[(.+)\]\n", TABLE.read_text(), flags=re.MULTILINE)[1:]
EXPECTED = {name: lines.splitlines() for name, lines in zip(SECTIONS[::2], SECTIONS[1::2], strict=True)}

# transformers: options of a configuration without which there is no model, or a slow one
OPTIONS = {
    "DbrxForCausalLM": {"d_model": 64, "n_heads": 4, "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2}},
    "EsmForMaskedLM": {"vocab_size": 33, "pad_token_id": 1},
    "HieraForPreTraining": {"decoder_hidden_size": 64, "decoder_depth": 1, "decoder_num_heads": 2},
    "NemotronForCausalLM": {"num_key_value_heads": 8},
    "ReformerModelWithLMHead": {"is_decoder": True},
}
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers")
MAX_LAYERS = 8  # of one kind of block; enough for the patterns of hybrid models


def build(name):
    """Build an architecture on the meta device, or skip the test."""
    library, kind = name.split("/")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        declare_operators_of_torchvision()  # which timm needs, and transformers imports where it is installed
        module = pytest.importorskip(library, reason=f"needs {library}: make test-models")
        with torch.device("meta"):
            if library == "timm":
                return module.create_model(kind)
            if library == "torchvision":
                return module.models.get_model(kind)
            model = getattr(module, kind, None) or pytest.skip(f"{library} {module.__version__} has no {kind}")
            return model() if library == "diffusers" else model(small(model.config_class, **OPTIONS.get(kind, {})))


def small(config_class, **options):
    """Make a configuration with fewer layers."""
    default = config_class(**options)
    if getattr(default, "layer_types", None):
        return default
    counts = {name: MAX_LAYERS for name in LAYER_COUNTS if name in vars(default) and vars(default)[name] > MAX_LAYERS}
    return config_class(**options, **counts)


def notation(role):
    """Write a role as in the table."""
    text = f"{role.kind} {','.join(map(str, role.fan_in_axes))}".strip()
    text += f" in {role.fan_in_groups} groups" * (role.fan_in_groups > 1) + " of 1 + w" * role.has_offset
    return text + ", unknown" * role.why.endswith(" is unknown")


def folded(roles):
    """Return the lines of an architecture: repeated blocks as *, and siblings with one role in braces."""
    blocks = {}
    for name, role in roles.items():
        blocks.setdefault(re.sub(r"\b\d+\b", "*", name), {})[name] = notation(role)
    lines = {}
    for block, members in blocks.items():
        is_uniform = len(set(members.values())) == 1
        for name, role in [(block, next(iter(members.values())))] if is_uniform else members.items():
            owner, _, leaf = name.rpartition(".")
            parent, _, layer = owner.rpartition(".")
            lines.setdefault((parent, leaf, role), []).append(layer)
    for (parent, leaf, role), layers in lines.items():
        layer = layers[0] if len(layers) == 1 else "{" + ",".join(layers) + "}"
        yield f"{'.'.join(part for part in (parent, layer, leaf) if part)}  {role}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EXPECTED)
def test_architecture_has_reviewed_roles(name):
    assert list(folded(roles_of(build(name)))) == EXPECTED[name]


if __name__ == "__main__":
    for name in EXPECTED:
        try:
            EXPECTED[name] = list(folded(roles_of(build(name))))
        except pytest.skip.Exception as reason:
            print(f"{name} stays as it is: {reason}")
    TABLE.write_text("".join(f"[{name}]\n" + "".join(f"{line}\n" for line in own) for name, own in EXPECTED.items()))
