"""The functions behind `import patcher`, one file each: results that a notebook shows."""
