//! Prints what the driver says of each device of this machine, and what a sample costs.
//!
//! `cargo run --release -p highwater-gpu --example readings [-- PATH_OF_LIBRARY]`

use std::{error::Error, path::PathBuf, time::Instant};

use highwater_gpu::{Device, Driver};

const SAMPLES: u32 = 1000;

fn main() -> Result<(), Box<dyn Error>> {
    let library = std::env::args_os().nth(1).map(PathBuf::from);
    let driver = Driver::open(library.as_deref())?;
    println!("driver {}", driver.version());
    let inventory = driver.inventory()?;
    for (index, error) in &inventory.failed {
        println!("GPU {index}: {error}");
    }
    for info in &inventory.devices {
        let mut device = Device::new(info.uuid.as_str());
        println!("{} {} {}: {:?}", info.label(), info.product, info.uuid, driver.sample(&mut device));
        let started = Instant::now();
        let torn = (0..SAMPLES).filter(|_| driver.sample(&mut device).torn).count();
        println!("{} {:?} a sample, {torn} of {SAMPLES} torn", info.label(), started.elapsed() / SAMPLES);
    }
    driver.close()?;
    Ok(())
}
