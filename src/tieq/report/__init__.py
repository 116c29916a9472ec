"""JSON to pages."""
