//! What the GPU driver says: devices, their memory, and the processes that use it.
//!
//! The driver's management library (NVML) is opened at run time, so the same program runs where
//! there is no GPU and says so. A [`Driver`] holds the library; dropping or closing it closes
//! every handle on a device, after which the driver may be upgraded or a GPU reset.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use highwater_gpu::{Device, Driver};
//!
//! let driver = Driver::open(None)?;
//! for info in driver.inventory()?.devices {
//!     let mut device = Device::new(info.uuid);
//!     let reading = driver.sample(&mut device);
//!     println!("{:?} of {:?} bytes used", reading.used, reading.total);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! A number that the driver does not give is `None`, never 0.
//!
//! [`Ballast`] makes memory that a descriptor holds, and [`Checkpoint`] moves a process's memory to
//! the host and back, both through the CUDA driver; [`Limits`] are those that newer drivers keep
//! themselves.

mod ballast;
mod cuda;
mod driver;
mod error;
mod inventory;
mod limits;
mod park;
mod processes;
mod sample;

pub use ballast::{Ballast, BallastError};
pub use cuda::LoadError;
pub use driver::Driver;
pub use error::{CallError, ErrorClass, OpenError};
pub use inventory::{DeviceInfo, Inventory, Partition};
pub use limits::{Limit, LimitError, Limits, Unavailable};
pub use park::{Checkpoint, ParkError, ProcessState};
pub use processes::{Kinds, Process};
pub use sample::{Device, MAX_RETAKES, Reading};
