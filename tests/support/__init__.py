"""What several tests share: models, batches, pages and calls."""
