"""What is served: model cards and their registration; models, LoRAs and media on this machine."""
