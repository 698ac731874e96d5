//! The pressure file: what the agent tells a pod.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::thread;

use rustix::fs::inotify;

use crate::run::say;

/// Prints the file's content, now and at each change, until the process ends.
pub(crate) fn watch(path: &Path) -> io::Result<()> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let events = inotify::init(inotify::CreateFlags::CLOEXEC)?;
    // The writer may replace the file, so the directory is what to look at.
    let changes =
        inotify::WatchFlags::CLOSE_WRITE | inotify::WatchFlags::MOVED_TO | inotify::WatchFlags::DELETE;
    inotify::add_watch(&events, directory, changes)?;
    let path = path.to_owned();
    thread::Builder::new().spawn(move || follow(&path, File::from(events)))?;
    Ok(())
}

fn follow(path: &PathBuf, mut events: File) {
    let mut known = None;
    let mut buffer = [0; 4096];
    loop {
        let content = std::fs::read_to_string(path).ok();
        if known.as_ref() != Some(&content) {
            let shown =
                content.as_deref().map_or("none".to_owned(), |content| content.trim().replace('\n', " "));
            say(&format!("pressure {shown}"));
            known = Some(content);
        }
        // What happened does not matter, only that something did.
        match events.read(&mut buffer) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return say(&format!("pressure: watching ended: {error}")),
        }
    }
}
