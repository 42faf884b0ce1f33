"""Pictures of schedules and masks, and predictions of the cost model."""
