//! Generates the messages, clients and servers of the kubelet's APIs, without protoc.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    let files = ["csi", "deviceplugin", "pluginregistration", "podresources"];
    let files = files.map(|name| format!("proto/{name}.proto"));
    let files = protox::compile(files, ["proto"])?;
    tonic_prost_build::configure().compile_fds(files)?;
    Ok(())
}
