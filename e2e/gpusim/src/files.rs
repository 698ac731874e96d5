//! Stand-ins for the driver's device files, which give a process away that has a device open.
//!
//! A simulated host has no `/dev/nvidia0`. The daemon puts empty files of these names beside its
//! socket, a device plugin mounts them into pods under `/dev`, and the library keeps them open as
//! the real one does.

use std::fs::{File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// The folder beside the socket.
pub const FOLDER: &str = "dev";
/// The file from which managed memory is mapped.
pub const UVM: &str = "nvidia-uvm";
/// The files that every process with a device opens.
pub const COMMON: [&str; 2] = ["nvidiactl", UVM];
/// Where device files are on a Linux.
const DEV: &str = "/dev";

/// The file of a device.
pub fn name(device: u32) -> String {
    format!("nvidia{device}")
}

/// Puts the files beside the socket.
///
/// # Errors
/// When the folder cannot be written.
pub(crate) fn make(socket: &Path, devices: u32) -> io::Result<()> {
    let folder = beside(socket);
    std::fs::create_dir_all(&folder)?;
    let names = COMMON.iter().map(|name| (*name).to_owned()).chain((0..devices).map(name));
    for name in names {
        let path = folder.join(name);
        File::options().create(true).append(true).open(&path)?;
        // Programs of any user open them for writing.
        std::fs::set_permissions(&path, Permissions::from_mode(0o666))?;
    }
    Ok(())
}

fn beside(socket: &Path) -> PathBuf {
    socket.parent().unwrap_or(Path::new(".")).join(FOLDER)
}

/// Opens one of the files: under `/dev` where one was mounted, else beside the socket. A device
/// file of a real driver is none of ours.
pub fn open(socket: &Path, name: &str) -> Option<File> {
    let places = [Path::new(DEV).join(name), beside(socket).join(name)];
    let place = places.iter().find(|place| place.is_file())?;
    let mut options = OpenOptions::new();
    let writable = options.read(true).write(true).open(place);
    writable.or_else(|_| File::open(place)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_are_beside_the_socket() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("gpu.sock");
        assert!(open(&socket, "nvidia-of-no-host").is_none());
        make(&socket, 2).unwrap();
        make(&socket, 2).unwrap();
        assert!(directory.path().join("dev/nvidia1").is_file());
        assert!(open(&socket, "nvidia1").is_some());
        assert!(open(&socket, "nvidia9").is_none());
    }
}
