"""The simulator: real policies of ``scheduler.core`` on a virtual clock and devices with measured costs."""
