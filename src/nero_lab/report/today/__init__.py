"""Tables and figures of the study of today's optimisers, from committed records alone."""
