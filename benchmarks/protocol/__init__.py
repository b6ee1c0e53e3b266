"""What the bucket protocol costs: per store, as a run grows, and as its workers grow in number."""
