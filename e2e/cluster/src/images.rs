//! Container images made on the spot: OCI layouts of the host's C library and our own binaries,
//! imported into each node's containerd. No registry, no builder.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::{
    command,
    components::{GUARD, READY, hex},
    node,
    paths::{Paths, write},
    spec::Spec,
};

/// The files of the host's C library that a dynamically linked Rust program may ask for.
const C_LIBRARY: &[&str] = &[
    "ld-linux-x86-64.so.2",
    "libc.so.6",
    "libdl.so.2",
    "libgcc_s.so.1",
    "libm.so.6",
    "libpthread.so.0",
    "librt.so.1",
];

/// Media type of an image's manifest.
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

const LIBRARY_FOLDER: &str = "usr/lib/x86_64-linux-gnu";

/// A part of the product, which is a layer in an image.
struct Part {
    name: &'static str,
    image: &'static str,
    /// Its files: the name among the cluster's programs, and the path in the image, which the chart
    /// knows.
    files: &'static [(&'static str, &'static str)],
}

const PARTS: &[Part] = &[
    Part { name: "agent", image: "agent", files: &[("agent", "usr/bin/agent")] },
    Part {
        name: "keeper",
        image: "agent",
        files: &[
            ("keeper", "usr/bin/keeper"),
            (GUARD, "usr/lib/highwater/libhighwater-guard.so"),
            (READY, "usr/lib/highwater/ready"),
        ],
    },
    Part { name: "operator", image: "operator", files: &[("operator", "usr/bin/operator")] },
];

impl Part {
    /// The layer; none until all of it is built.
    fn layer(&self, paths: &Paths) -> Result<Option<Vec<u8>>> {
        let mut layer = Layer::default();
        for (program, path) in self.files {
            let program = paths.program(program);
            if !program.exists() {
                return Ok(None);
            }
            layer.file(path, &fs::read(program)?, 0o755)?;
        }
        layer.finish().map(Some)
    }
}

/// Builds the images and imports those that a node does not have yet; the names of the new ones.
pub fn ensure(paths: &Paths, spec: &Spec) -> Result<Vec<String>> {
    ensure!(cfg!(target_arch = "x86_64"), "the test cluster's images are made for x86-64 only");
    let mut fresh = Vec::new();
    for image in all(paths)? {
        for node in spec.nodes() {
            let marker = paths.node(&node.name()).join("images").join(&image.name);
            if fs::read_to_string(&marker).is_ok_and(|digest| digest == image.digest) {
                continue;
            }
            let archive = paths.data.join("images").join(format!("{}.tar", image.name));
            write(&archive, &image.archive)?;
            node::output(
                paths,
                &node.name(),
                Command::new("/usr/bin/ctr").args(["--namespace=k8s.io", "images", "import"]).arg(&archive),
            )
            .with_context(|| format!("importing the image {} into {node}", image.name))?;
            write(&marker, &image.digest)?;
            fresh.push(image.name.clone());
        }
    }
    fresh.dedup();
    Ok(fresh)
}

/// A digest of what the pods of each part of the product run. It tells the keeper from the agent,
/// whose image they share: to replace the keeper for a new agent would be a pity.
pub fn digests(paths: &Paths) -> Result<BTreeMap<&'static str, String>> {
    let base = digest(&c_library()?);
    let mut digests = BTreeMap::new();
    for part in PARTS {
        if let Some(layer) = part.layer(paths)? {
            digests.insert(part.name, digest(format!("{base} {}", digest(&layer)).as_bytes()));
        }
    }
    Ok(digests)
}

struct Image {
    name: String,
    /// Of the manifest.
    digest: String,
    /// OCI layout as a tar archive.
    archive: Vec<u8>,
}

/// The images whose programs are built.
fn all(paths: &Paths) -> Result<Vec<Image>> {
    let mut images = vec![pause()?];
    let base = c_library()?;
    for name in ["agent", "operator"] {
        let mut layers = vec![base.clone()];
        for part in PARTS.iter().filter(|part| part.image == name) {
            layers.extend(part.layer(paths)?);
        }
        if layers.len() > 1 {
            images.push(image(name, &[format!("/usr/bin/{name}")], &layers)?);
        }
    }
    images.push(workload(paths, base)?);
    Ok(images)
}

/// A base to run programs of the host's own distribution.
fn c_library() -> Result<Vec<u8>> {
    let mut layer = Layer::default();
    for (link, target) in [("bin", "usr/bin"), ("lib", "usr/lib"), ("lib64", "usr/lib64")] {
        layer.link(link, target)?;
    }
    for name in C_LIBRARY {
        let host = ["/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", "/usr/lib"]
            .iter()
            .map(|folder| Path::new(folder).join(name))
            .find(|path| path.exists())
            .with_context(|| format!("the host's C library has no {name}"))?;
        layer.file(&format!("{LIBRARY_FOLDER}/{name}"), &fs::read(host)?, 0o755)?;
    }
    layer.link("usr/lib64/ld-linux-x86-64.so.2", &format!("/{LIBRARY_FOLDER}/ld-linux-x86-64.so.2"))?;
    layer.file("etc/passwd", b"root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n", 0o644)?;
    layer.file("etc/group", b"root:x:0:\nnogroup:x:65534:\n", 0o644)?;
    layer.directory("tmp", 0o1777)?;
    layer.finish()
}

/// The workload program, and busybox so that tests can look around in its pods.
fn workload(paths: &Paths, base: Vec<u8>) -> Result<Image> {
    let mut tools = Layer::default();
    tools.file("usr/bin/busybox", &fs::read("/bin/busybox").context("reading busybox")?, 0o755)?;
    let applets = command::output(Command::new("/bin/busybox").arg("--list"))?;
    for applet in applets.lines().filter(|applet| *applet != "busybox") {
        tools.link(&format!("usr/bin/{applet}"), "busybox")?;
    }
    let mut layers = vec![base, tools.finish()?];
    let program = paths.program("workload");
    if program.exists() {
        let mut layer = Layer::default();
        layer.file("usr/bin/workload", &fs::read(program)?, 0o755)?;
        layers.push(layer.finish()?);
    }
    image("workload", &["/usr/bin/workload".into()], &layers)
}

/// What holds a pod's namespaces: a program that waits for ever and lets the kernel reap orphans.
fn pause() -> Result<Image> {
    let mut layer = Layer::default();
    layer.file("pause", &pause_program(), 0o755)?;
    image("pause", &["/pause".into()], &[layer.finish()?])
}

/// An x86-64 executable: `sigaction(SIGCHLD, SIG_IGN)`, then `pause()` in a loop.
fn pause_program() -> Vec<u8> {
    const BASE: u64 = 0x40_0000;
    const HEADERS: u64 = 64 + 56;
    const CODE: &[u8] = &[
        0xb8, 13, 0, 0, 0, // mov eax, rt_sigaction
        0xbf, 17, 0, 0, 0, // mov edi, SIGCHLD
        0xbe, 0x9a, 0, 0x40, 0, // mov esi, the action behind this code
        0x31, 0xd2, // xor edx, edx
        0x41, 0xba, 8, 0, 0, 0, // mov r10d, size of a signal set
        0x0f, 0x05, // syscall
        0xb8, 34, 0, 0, 0, // mov eax, pause
        0x0f, 0x05, // syscall
        0xeb, 0xf7, // jmp back to the mov
    ];
    let mut action = [0_u8; 32];
    action[0] = 1; // SIG_IGN
    let size = HEADERS + CODE.len() as u64 + action.len() as u64;
    let mut elf = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    elf.extend([2, 0, 62, 0, 1, 0, 0, 0]); // executable, x86-64, version
    elf.extend((BASE + HEADERS).to_le_bytes()); // entry
    elf.extend(64_u64.to_le_bytes()); // program headers
    elf.extend([0; 12]); // no section headers, no flags
    elf.extend([64, 0, 56, 0, 1, 0, 64, 0, 0, 0, 0, 0]); // sizes and counts of headers
    elf.extend([1, 0, 0, 0, 5, 0, 0, 0]); // load, readable and executable
    for value in [0, BASE, BASE, size, size, 0x1000] {
        elf.extend(value.to_le_bytes());
    }
    elf.extend(CODE);
    elf.extend(action);
    elf
}

fn image(name: &str, entrypoint: &[String], layers: &[Vec<u8>]) -> Result<Image> {
    let config = serde_json::to_vec(&json!({
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": entrypoint, "Env": ["PATH=/usr/bin:/bin"]},
        "rootfs": {"type": "layers", "diff_ids": layers.iter().map(|layer| digest(layer)).collect::<Vec<_>>()},
    }))?;
    let layer_type = "application/vnd.oci.image.layer.v1.tar";
    let manifest = serde_json::to_vec(&json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": descriptor("application/vnd.oci.image.config.v1+json", &config),
        "layers": layers.iter().map(|layer| descriptor(layer_type, layer)).collect::<Vec<_>>(),
    }))?;
    let reference = format!("highwater.local/{name}:dev");
    let entry = json!({
        "mediaType": MANIFEST,
        "digest": digest(&manifest),
        "size": manifest.len(),
        "annotations": {"io.containerd.image.name": reference, "org.opencontainers.image.ref.name": reference},
    });
    let mut archive = Layer::default();
    archive.file("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#, 0o644)?;
    archive.file(
        "index.json",
        &serde_json::to_vec(&json!({"schemaVersion": 2, "manifests": [entry]}))?,
        0o644,
    )?;
    let mut blobs: Vec<&[u8]> = layers.iter().map(Vec::as_slice).collect();
    blobs.extend([config.as_slice(), manifest.as_slice()]);
    for blob in blobs {
        archive.file(&format!("blobs/{}", digest(blob).replace(':', "/")), blob, 0o644)?;
    }
    Ok(Image { name: name.to_owned(), digest: digest(&manifest), archive: archive.finish()? })
}

fn descriptor(media_type: &str, blob: &[u8]) -> Value {
    json!({"mediaType": media_type, "digest": digest(blob), "size": blob.len()})
}

fn digest(blob: &[u8]) -> String {
    format!("sha256:{}", hex(&Sha256::digest(blob), 64))
}

/// A tar archive with nothing in it that varies from build to build.
struct Layer(tar::Builder<Vec<u8>>);

impl Default for Layer {
    fn default() -> Self {
        Self(tar::Builder::new(Vec::new()))
    }
}

impl Layer {
    fn file(&mut self, path: &str, content: &[u8], mode: u32) -> io::Result<()> {
        let mut header = Self::header(tar::EntryType::Regular, mode);
        header.set_size(content.len() as u64);
        self.0.append_data(&mut header, path, content)
    }

    fn directory(&mut self, path: &str, mode: u32) -> io::Result<()> {
        self.0.append_data(&mut Self::header(tar::EntryType::Directory, mode), path, io::empty())
    }

    fn link(&mut self, path: &str, target: &str) -> io::Result<()> {
        self.0.append_link(&mut Self::header(tar::EntryType::Symlink, 0o777), path, PathBuf::from(target))
    }

    fn header(kind: tar::EntryType, mode: u32) -> tar::Header {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_size(0);
        header
    }

    fn finish(self) -> Result<Vec<u8>> {
        self.0.into_inner().context("closing an archive")
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn the_same_content_gives_the_same_image() {
        assert_eq!(pause().unwrap().digest, pause().unwrap().digest);
    }

    #[test]
    fn the_layout_names_its_image_and_holds_every_blob_that_it_mentions() {
        let image = pause().unwrap();
        let mut files = BTreeMap::new();
        for entry in tar::Archive::new(image.archive.as_slice()).entries().unwrap() {
            let mut entry = entry.unwrap();
            let mut content = Vec::new();
            io::Read::read_to_end(&mut entry, &mut content).unwrap();
            files.insert(entry.path().unwrap().display().to_string(), content);
        }
        let index: Value = serde_json::from_slice(&files["index.json"]).unwrap();
        let entry = &index["manifests"][0];
        assert_eq!(entry["annotations"]["io.containerd.image.name"], "highwater.local/pause:dev");
        let blob = |digest: &Value| &files[&format!("blobs/{}", digest.as_str().unwrap().replace(':', "/"))];
        let manifest: Value = serde_json::from_slice(blob(&entry["digest"])).unwrap();
        let config: Value = serde_json::from_slice(blob(&manifest["config"]["digest"])).unwrap();
        assert_eq!(config["rootfs"]["diff_ids"][0], manifest["layers"][0]["digest"]);
        assert!(!blob(&manifest["layers"][0]["digest"]).is_empty());
    }

    #[test]
    fn the_pause_program_runs_and_waits() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("pause");
        fs::write(&program, pause_program()).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let mut child = Command::new(&program).spawn().unwrap();
        let call = format!("/proc/{}/syscall", child.id());
        while !fs::read_to_string(&call).unwrap().starts_with("34 ") {
            assert!(child.try_wait().unwrap().is_none(), "the program ended");
            std::thread::yield_now();
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
