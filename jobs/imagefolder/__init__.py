"""ResNet on a folder of images, the classic job of a cluster; see job.py."""
