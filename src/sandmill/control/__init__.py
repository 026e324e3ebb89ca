"""The control API: `sandmill serve`. It decides and never carries data; noded does, and is the truth about what runs."""
