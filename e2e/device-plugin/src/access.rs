//! What a container needs to use a device.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail};
use kubelet_api::deviceplugin::{ContainerAllocateResponse, DeviceSpec, Mount};

use crate::devices::Gpu;

/// The driver's management library.
pub(crate) const NVML: &str = "libnvidia-ml.so.1";
/// The driver's compute library.
const CUDA: &str = "libcuda.so.1";
/// What CUDA itself loads when programs bring code for other devices, if the driver has it.
const COMPILERS: [&str; 2] = ["libnvidia-ptxjitcompiler.so.1", "libnvidia-nvvm.so.4"];
/// Device nodes that every container with a device needs, if the node has them.
const COMMON_NODES: [&str; 3] = ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"];
/// Stand-ins for device nodes, in the simulated driver's directory.
const STAND_INS: &str = "dev";
/// Those of them that every container with a device needs.
const COMMON_STAND_INS: [&str; 2] = ["nvidiactl", "nvidia-uvm"];
/// Says which devices are a container's.
const VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";

/// Mounts for every container, and whether device nodes come with them.
#[derive(Debug, Clone)]
pub(crate) struct Access {
    mounts: Vec<Mount>,
    files: Files,
}

/// The device files of a container.
#[derive(Debug, Clone)]
enum Files {
    /// Device nodes: those that every container needs, and one a device.
    Nodes(Vec<String>),
    /// Plain files in that directory, mounted where the nodes would be.
    StandIns(PathBuf),
}

impl Access {
    /// For devices of the simulator.
    pub(crate) fn simulated(libraries: &Path, socket_directory: &Path) -> Self {
        let library = |name| mount(&libraries.join(name), &in_container(name));
        let mounts = vec![library(CUDA), library(NVML), mount(socket_directory, Path::new("/run/gpusim"))];
        Self { mounts, files: Files::StandIns(socket_directory.join(STAND_INS)) }
    }

    /// For the devices of this node.
    pub(crate) fn real(driver_root: &Path) -> Result<Self> {
        let mut mounts = Vec::new();
        for name in [CUDA, NVML] {
            mounts.push(mount(&find_library(driver_root, name)?, &in_container(name)));
        }
        for name in COMPILERS {
            match find_library(driver_root, name) {
                Ok(path) => mounts.push(mount(&path, &in_container(name))),
                Err(error) => tracing::info!(%error, "pods do without"),
            }
        }
        let nodes = COMMON_NODES.iter().filter(|node| Path::new(node).exists());
        Ok(Self { mounts, files: Files::Nodes(nodes.map(|node| (*node).to_owned()).collect()) })
    }

    /// What to give a container with these devices.
    pub(crate) fn response(&self, gpus: &[Gpu]) -> Result<ContainerAllocateResponse> {
        let uuids: Vec<&str> = gpus.iter().map(|gpu| gpu.uuid.as_str()).collect();
        let (mut devices, mut mounts) = (Vec::new(), self.mounts.clone());
        match &self.files {
            Files::Nodes(common) => {
                devices.extend(common.iter().map(|node| device_node(node)));
                for gpu in gpus {
                    match gpu.minor {
                        Some(minor) => devices.push(device_node(&format!("/dev/nvidia{minor}"))),
                        None => {
                            bail!("{} is a MIG instance: these are handed out in simulation only", gpu.uuid)
                        }
                    }
                }
            }
            Files::StandIns(directory) => {
                let mut names: Vec<_> = COMMON_STAND_INS.iter().map(|name| (*name).to_owned()).collect();
                names.extend(gpus.iter().filter_map(|gpu| gpu.file).map(|number| format!("nvidia{number}")));
                names.sort_unstable();
                names.dedup();
                let files = names.iter().map(|name| (directory.join(name), Path::new("/dev").join(name)));
                let present = files.filter(|(host, _)| host.is_file());
                mounts.extend(present.map(|(host, container)| mount(&host, &container)));
            }
        }
        Ok(ContainerAllocateResponse {
            envs: HashMap::from([(VISIBLE_DEVICES.to_owned(), uuids.join(","))]),
            mounts,
            devices,
            ..ContainerAllocateResponse::default()
        })
    }
}

/// Finds a library of the driver, behind all its links.
pub(crate) fn find_library(driver_root: &Path, name: &str) -> Result<PathBuf> {
    let multiarch = format!("usr/lib/{}-linux-gnu", std::env::consts::ARCH);
    let places = ["usr/local/nvidia/lib64", &multiarch, "usr/lib64", "lib64", "usr/lib", "lib"];
    let places = places.iter().map(|place| driver_root.join(place).join(name));
    let cached = (driver_root == Path::new("/")).then(|| loader_cache(name)).flatten();
    match places.chain(cached).find_map(|path| path.canonicalize().ok()) {
        Some(path) => Ok(path),
        None => bail!(
            "no {name} under {}: install the NVIDIA driver, or say where it is by --driver-root",
            driver_root.display()
        ),
    }
}

/// Where the dynamic loader finds a library.
fn loader_cache(name: &str) -> Option<PathBuf> {
    let output = Command::new("ldconfig").arg("-p").output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = text.lines().find(|line| line.trim_start().starts_with(name))?;
    line.split_once("=> ").map(|(_, path)| PathBuf::from(path.trim()))
}

/// Where the loaders of Debian and its like look, whatever else an image has.
fn in_container(library: &str) -> PathBuf {
    Path::new(&format!("/usr/lib/{}-linux-gnu", std::env::consts::ARCH)).join(library)
}

fn mount(host: &Path, container: &Path) -> Mount {
    Mount {
        container_path: container.display().to_string(),
        host_path: host.display().to_string(),
        read_only: true,
    }
}

fn device_node(path: &str) -> DeviceSpec {
    DeviceSpec { container_path: path.to_owned(), host_path: path.to_owned(), permissions: "rw".to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(uuid: &str, minor: Option<u32>) -> Gpu {
        Gpu { uuid: uuid.into(), minor, file: minor, healthy: true }
    }

    #[test]
    fn a_simulated_device_comes_with_libraries_and_socket() {
        let access = Access::simulated(Path::new("/opt/gpusim/lib"), Path::new("/run/gpusim"));
        let response = access.response(&[gpu("GPU-a", Some(0)), gpu("GPU-b", Some(1))]).unwrap();
        assert_eq!(response.envs[VISIBLE_DEVICES], "GPU-a,GPU-b");
        assert!(response.devices.is_empty());
        let mounts: Vec<_> = response.mounts.iter().map(|mount| mount.host_path.as_str()).collect();
        assert_eq!(
            mounts,
            ["/opt/gpusim/lib/libcuda.so.1", "/opt/gpusim/lib/libnvidia-ml.so.1", "/run/gpusim"]
        );
        assert!(response.mounts[0].container_path.ends_with("-linux-gnu/libcuda.so.1"));
    }

    #[test]
    fn a_simulated_device_comes_with_the_files_that_stand_for_its_nodes() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("dev")).unwrap();
        for name in ["nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1"] {
            std::fs::write(directory.path().join("dev").join(name), "").unwrap();
        }
        let access = Access::simulated(Path::new("/opt/gpusim/lib"), directory.path());
        let instance = |uuid: &str| Gpu { file: Some(1), ..gpu(uuid, None) };
        let response =
            access.response(&[instance("MIG-a"), instance("MIG-b"), gpu("GPU-c", Some(7))]).unwrap();
        let mounts = response.mounts.iter().map(|mount| mount.container_path.as_str());
        let files: Vec<_> = mounts.filter(|path| path.starts_with("/dev/")).collect();
        assert_eq!(files, ["/dev/nvidia-uvm", "/dev/nvidia1", "/dev/nvidiactl"]);
    }

    #[test]
    fn a_real_device_comes_with_its_node_and_the_real_files() {
        let root = tempfile::tempdir().unwrap();
        let libraries = root.path().join("usr/local/nvidia/lib64");
        std::fs::create_dir_all(&libraries).unwrap();
        for name in [CUDA, NVML] {
            let real = format!("{name}.580.1");
            std::fs::write(libraries.join(&real), "").unwrap();
            std::os::unix::fs::symlink(&real, libraries.join(name)).unwrap();
        }
        let access = Access::real(root.path()).unwrap();
        let response = access.response(&[gpu("GPU-a", Some(3))]).unwrap();
        assert_eq!(response.devices.last().unwrap().host_path, "/dev/nvidia3");
        assert!(response.mounts[0].host_path.ends_with("libcuda.so.1.580.1"));
        assert_eq!(response.mounts.len(), 2);
        assert!(access.response(&[gpu("MIG-a", None)]).is_err());
    }

    #[test]
    fn a_node_without_driver_is_told_what_to_do() {
        let root = tempfile::tempdir().unwrap();
        let error = Access::real(root.path()).unwrap_err().to_string();
        assert!(error.contains("install the NVIDIA driver"), "{error}");
    }
}
