//! How the program is linked as shipped: by itself, with no start files and no C library.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if std::env::var_os("CARGO_FEATURE_FREESTANDING").is_some() {
        for argument in [
            "-nostartfiles",
            "-nostdlib",
            "-static",
            "-no-pie",
            "-Wl,--build-id=none",
            "-Wl,-z,noseparate-code",
        ] {
            println!("cargo:rustc-link-arg-bins={argument}");
        }
    }
}
