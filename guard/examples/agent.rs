//! The agent of the tests as a program, to try a guard by hand or on a real GPU:
//!
//!     mkdir -p pod/run && cp libhighwater_guard.so pod/libhighwater-guard.so
//!     agent pod/run/agent.sock GPU-... 16G 518M &
//!     LD_PRELOAD=$PWD/pod/libhighwater-guard.so python3 train.py
//!
//! Its arguments are the socket, the device's UUID, the limit, and what a context takes. Told `charged`,
//! `heard`, `audit` or `limit SIZE` on its input, it answers by a line.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "a tool for tests")]

#[path = "../tests/guarded/agent.rs"]
#[allow(dead_code, clippy::expect_used, clippy::cast_possible_truncation, reason = "the tests use all of it")]
mod agent;

use std::io::BufRead;
use std::path::Path;

use highwater_guard_abi::page::{DeviceQuota, Managed};

fn size(text: &str) -> u64 {
    let (digits, shift) = match text.as_bytes().last().unwrap() {
        b'M' => (&text[..text.len() - 1], 20),
        b'G' => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    digits.parse::<u64>().unwrap() << shift
}

fn uuid(text: &str) -> [u8; 16] {
    let digits: String = text.split_once('-').unwrap().1.chars().filter(char::is_ascii_hexdigit).collect();
    std::array::from_fn(|index| u8::from_str_radix(&digits[index * 2..index * 2 + 2], 16).unwrap())
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [socket, device, limit, context] = &arguments[..] else {
        panic!("usage: agent SOCKET UUID LIMIT CONTEXT");
    };
    let quota = DeviceQuota {
        uuid: uuid(device),
        limit: size(limit),
        granted: size(limit),
        context: size(context),
        free: u64::MAX,
        total: 0,
        managed: Managed::Charge,
        wait_milliseconds: 0,
    };
    let agent = agent::Agent::start(Path::new(socket), &[quota]);
    println!("ready");
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        match line.split_once(' ').unwrap_or((&line, "")) {
            ("charged", _) => println!("{}", agent.charged()),
            ("heard", _) => println!("{:?}", agent.heard()),
            ("audit", _) => println!("{}", agent.is_consistent()),
            ("limit", limit) => {
                agent.set(&DeviceQuota { limit: size(limit), granted: size(limit), ..quota });
                println!("{limit}");
            }
            _ => println!("charged, heard, audit or limit SIZE"),
        }
    }
    // Without input it serves until it is killed.
    loop {
        std::thread::park();
    }
}
