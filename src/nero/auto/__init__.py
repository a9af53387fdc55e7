"""The angle of ``lr="auto"``, from the depth of the network."""
