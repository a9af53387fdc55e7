"""The networks of the experiments: the paper's, written from its appendix, and those of other studies."""
