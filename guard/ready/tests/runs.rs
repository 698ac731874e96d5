//! Runs the program as it is shipped: static, without a C library. `HIGHWATER_READY_HELPER` names
//! another build of it to test.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::{
    env, fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
    sync::LazyLock,
    time::{SystemTime, UNIX_EPOCH},
};

static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| {
    if let Some(path) = env::var_os("HIGHWATER_READY_HELPER") {
        return path.into();
    }
    let target = env::current_exe().unwrap().ancestors().nth(3).map(Path::to_owned).unwrap();
    let mut build = Command::new(env!("CARGO"));
    build.args([
        "build",
        "--quiet",
        "--profile",
        "guard",
        "-p",
        "highwater-ready",
        "--features",
        "freestanding",
    ]);
    build.args(["--manifest-path", concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"), "--target-dir"]);
    assert!(build.arg(&target).status().unwrap().success(), "the program does not build");
    target.join("guard/ready")
});

fn code(arguments: &[&Path]) -> Option<i32> {
    // Nothing of the surroundings is needed.
    Command::new(&*PROGRAM).args(arguments).env_clear().current_dir("/").status().unwrap().code()
}

fn milliseconds() -> u64 {
    u64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis()).unwrap()
}

#[test]
fn it_says_what_the_file_says() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("pressure.json");
    let after = |text: String| {
        fs::write(&path, text).unwrap();
        code(&[&path])
    };
    assert_eq!(
        after(format!(r#"{{"level":"Critical","unreadyUntil":{}}}"#, milliseconds() + 30_000)),
        Some(1)
    );
    assert_eq!(after(format!(r#"{{"level":"Critical","unreadyUntil":{}}}"#, milliseconds() - 1)), Some(0));
    assert_eq!(after(r#"{"level":"Normal"}"#.into()), Some(0));
    assert_eq!(after("{".into()), Some(0));
    let long = format!(r#"{{"unreadyUntil":{},"a":"{}"}}"#, milliseconds() + 30_000, "x".repeat(64 << 10));
    assert_eq!(after(long), Some(0), "longer than any of the agent's");
    let nearly = format!(r#"{{"unreadyUntil":{},"a":"{}"}}"#, milliseconds() + 30_000, "x".repeat(60 << 10));
    assert_eq!(after(nearly), Some(1));
}

#[test]
fn whatever_is_in_the_way_the_pod_is_ready() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    assert_eq!(code(&[]), Some(0));
    assert_eq!(code(&[&path("missing")]), Some(0));
    assert_eq!(code(&[directory.path()]), Some(0), "a directory");
    assert_eq!(code(&[Path::new("/dev/zero")]), Some(0), "no end");
    assert!(Command::new("mkfifo").arg(path("fifo")).status().unwrap().success());
    assert_eq!(code(&[&path("fifo")]), Some(0), "nobody writes");
    std::os::unix::fs::symlink(path("loop"), path("loop")).unwrap();
    assert_eq!(code(&[&path("loop")]), Some(0));
    fs::write(path("secret"), "{}").unwrap();
    fs::set_permissions(path("secret"), fs::Permissions::from_mode(0o0)).unwrap();
    assert_eq!(code(&[&path("secret")]), Some(0));
}

#[test]
fn it_needs_nothing_and_is_tiny() {
    let program = fs::read(&*PROGRAM).unwrap();
    assert!(program.len() < 32 << 10, "{} bytes", program.len());
    assert_eq!(&program[..4], b"\x7fELF");
    // Program headers: none asks for a loader (3), none is dynamic (2).
    let word = |at: usize| u16::from_le_bytes([program[at], program[at + 1]]);
    let offset = usize::try_from(u64::from_le_bytes(program[32..40].try_into().unwrap())).unwrap();
    let (size, count) = (usize::from(word(54)), usize::from(word(56)));
    let kinds: Vec<u16> = (0..count).map(|at| word(offset + at * size)).collect();
    assert!(kinds.contains(&1) && !kinds.contains(&2) && !kinds.contains(&3), "{kinds:?}");
}
