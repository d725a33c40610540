"""Data of LightNet runs: raw text to token shards (``lightnet prep``) and the data sets that read them."""
