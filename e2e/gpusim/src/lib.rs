//! A simulated NVIDIA driver: one daemon stands for the driver of a host, and the libraries
//! `libcuda.so.1` and `libnvidia-ml.so.1` built beside this crate speak to it over a unix socket.
//!
//! [`driver`] holds the behaviour and knows neither sockets nor clocks; [`daemon`] serves it;
//! [`identity`] and [`cgroup`] learn from the kernel who calls; [`client`] is the other end, and
//! [`epoch`] tells it when it need not ask again.

pub mod cgroup;
pub mod client;
pub mod config;
pub mod daemon;
pub mod driver;
mod epoch;
mod exports;
pub mod fault;
pub mod files;
pub mod identity;
pub mod protocol;
pub mod size;
pub mod visible;
