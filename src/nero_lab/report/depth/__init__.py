"""Tables and figure of the study of step size by depth, from committed records alone."""
