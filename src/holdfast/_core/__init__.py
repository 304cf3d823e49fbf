"""What every part of Holdfast stands on: saves and loads, and the messages between ranks."""
