"""Pure maths on arrays: advantages, aggregation, losses."""
