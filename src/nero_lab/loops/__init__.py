"""What a step is: of a network that learns from labels, of two that train each other, of one that plays."""
