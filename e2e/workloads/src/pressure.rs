//! The pressure file: what the agent tells a pod.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::thread;

use rustix::fs::inotify;

use crate::errands::{Asker, Wish};
use crate::run::say;

/// What a pod does something about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Heeded {
    /// A level that is not `Normal`.
    Level,
    /// That the pod is to take no requests.
    Unready,
}

impl Heeded {
    /// Whether a file with this content asks for it.
    fn asked_for(self, content: &str) -> bool {
        match self {
            Self::Level => content.contains("\"level\":") && !content.contains("\"level\":\"Normal\""),
            Self::Unready => content.contains("\"unreadyUntil\":"),
        }
    }
}

/// Prints the file's content, now and at each change, until the process ends.
pub(crate) fn watch(path: &Path) -> io::Result<()> {
    let shown = |content: Option<&str>| {
        let shown = content.map_or("none".to_owned(), |content| content.trim().replace('\n', " "));
        say(&format!("pressure {shown}"));
    };
    at_each_change(path, shown)
}

/// Gives the cache back, now and at each change, where the file asks for it, until the process ends.
pub(crate) fn heed(path: &Path, what: Heeded, asker: Asker) -> io::Result<()> {
    at_each_change(path, move |content| {
        if content.is_some_and(|content| what.asked_for(content)) {
            match asker.ask(Wish::Flush) {
                Ok(bytes) => say(&format!("heeded {what:?} bytes={bytes}")),
                Err(why) => say(&format!("heeded {what:?} in vain: {why}")),
            }
        }
    })
}

fn at_each_change(path: &Path, tell: impl FnMut(Option<&str>) + Send + 'static) -> io::Result<()> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let events = inotify::init(inotify::CreateFlags::CLOEXEC)?;
    // The writer may replace the file, so the directory is what to look at.
    let changes =
        inotify::WatchFlags::CLOSE_WRITE | inotify::WatchFlags::MOVED_TO | inotify::WatchFlags::DELETE;
    inotify::add_watch(&events, directory, changes)?;
    let path = path.to_owned();
    thread::Builder::new().spawn(move || follow(&path, File::from(events), tell))?;
    Ok(())
}

fn follow(path: &PathBuf, mut events: File, mut tell: impl FnMut(Option<&str>)) {
    let mut known = None;
    let mut buffer = [0; 4096];
    loop {
        let content = std::fs::read_to_string(path).ok();
        if known.as_ref() != Some(&content) {
            tell(content.as_deref());
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_file_asks_for_is_heeded() {
        let calm = r#"{"level":"Normal","device":"GPU-1"}"#;
        let high = r#"{"level":"Critical","device":"GPU-1"}"#;
        let away = r#"{"level":"Normal","unreadyUntil":1767225600000}"#;
        let heeded = |what: Heeded| [calm, high, away, ""].map(|content| what.asked_for(content));
        assert_eq!(heeded(Heeded::Level), [false, true, false, false]);
        assert_eq!(heeded(Heeded::Unready), [false, false, true, false]);
    }
}
