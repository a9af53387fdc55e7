"""The paper's networks, written from its appendix."""
