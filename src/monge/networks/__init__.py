"""Networks: their interface, their caches, and hosts that read trees and chains."""
