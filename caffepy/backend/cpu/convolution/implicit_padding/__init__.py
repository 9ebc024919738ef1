"""Convolutions on the CPU that read images where they lie, without a padded copy. direct imports it."""
