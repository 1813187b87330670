"""The strategy for Fabric."""
