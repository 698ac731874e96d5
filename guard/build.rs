//! How the library is linked.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libhighwater-guard.so");
    // Programs hold addresses of its functions.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // What it says of its own functions means its own, whoever is loaded before it under these names.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic-functions");
}
