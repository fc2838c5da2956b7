"""How text is made: requests are scheduled into batches, and each finished sequence becomes a rollout."""
