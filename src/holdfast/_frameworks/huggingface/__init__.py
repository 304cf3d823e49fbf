"""Published weights loaded into, and saved from, live Megatron models: what the bridges' folders share."""
