"""What happens when a layer of a streamed store is called."""
