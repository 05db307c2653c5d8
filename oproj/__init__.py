"""The FP8 attention output projection of DeepSeek-V4 on SM90, SM100 and SM120."""

__version__ = "0.1.0"
