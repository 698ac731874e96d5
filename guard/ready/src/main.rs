//! `ready PATH`: what a pod's readiness probe runs to be taken out of its Services while memory is
//! short. It ends with 1 while the pressure file at PATH says so, and with 0 in every other case:
//! nothing that is missing, late or broken makes a pod unready.
//!
//! It runs every few seconds in containers that nobody here knows, with whatever C library they
//! have or none, so as shipped it is static, a few kilobytes large, and asks the kernel for four
//! things.

#![cfg_attr(feature = "freestanding", no_std, no_main, no_builtins)]

#[cfg(all(feature = "freestanding", not(panic = "abort")))]
compile_error!("build the program as it is shipped with `--profile guard`");

mod pressure;

/// Longest file that is read, in bytes. The agent's have less than 1 KiB.
const LONGEST: usize = 64 << 10;

/// How it is without the standard library.
#[cfg(feature = "freestanding")]
mod bare;

#[cfg(not(feature = "freestanding"))]
fn main() -> std::process::ExitCode {
    use std::{
        io::Read,
        time::{SystemTime, UNIX_EPOCH},
    };

    let read = || {
        let file = std::fs::File::open(std::env::args_os().nth(1)?).ok()?;
        let mut text = Vec::new();
        let most = u64::try_from(LONGEST).ok()?.saturating_add(1);
        file.take(most).read_to_end(&mut text).ok()?;
        (text.len() <= LONGEST).then_some(text)
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
    let unready =
        read().is_some_and(|text| pressure::is_unready(&text, u64::try_from(now).unwrap_or(u64::MAX)));
    std::process::ExitCode::from(u8::from(unready))
}
