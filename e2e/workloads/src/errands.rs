//! What other threads ask of the one that follows the script: it alone speaks to the driver.
//!
//! It looks here whenever it waits, so that an engine that is busy answers when it is not.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};

/// How long a thread waits for what it asked for.
const PATIENCE: Duration = Duration::from_secs(20);

/// What can be asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wish {
    /// Give the cache back.
    Flush,
    /// Give everything back, and remember how much it was.
    Sleep,
    /// Take again what was given back to sleep.
    WakeUp,
}

/// Bytes that were given back or taken, or why nothing was.
pub(crate) type Answer = Result<u64, String>;

/// Something asked for, and who waits for the answer.
#[derive(Debug)]
pub(crate) struct Errand {
    pub(crate) wish: Wish,
    answer: Sender<Answer>,
}

impl Errand {
    /// Tells who asked. It may have gone meanwhile.
    pub(crate) fn answer(self, answer: Answer) {
        let _ = self.answer.send(answer);
    }
}

/// The side of those who ask.
#[derive(Debug, Clone)]
pub(crate) struct Asker {
    errands: Sender<Errand>,
    bell: Arc<File>,
}

impl Asker {
    /// Asks, and waits for the answer.
    pub(crate) fn ask(&self, wish: Wish) -> Answer {
        let (answer, answered) = mpsc::channel();
        self.errands.send(Errand { wish, answer }).map_err(|_| "the script has ended".to_owned())?;
        (&*self.bell).write_all(&1_u64.to_ne_bytes()).map_err(|error| error.to_string())?;
        answered.recv_timeout(PATIENCE).map_err(|_| "the script is busy".to_owned())?
    }
}

/// The side of the thread that follows the script.
#[derive(Debug)]
pub(crate) struct Errands {
    asker: Asker,
    waiting: Receiver<Errand>,
}

impl Errands {
    /// Nobody has asked for anything yet.
    pub(crate) fn new() -> io::Result<Self> {
        let bell = Arc::new(File::from(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?));
        let (errands, waiting) = mpsc::channel();
        Ok(Self { asker: Asker { errands, bell }, waiting })
    }

    /// By which others can ask.
    pub(crate) fn asker(&self) -> Asker {
        self.asker.clone()
    }

    /// Can be read when somebody has asked.
    pub(crate) fn bell(&self) -> BorrowedFd<'_> {
        self.asker.bell.as_fd()
    }

    /// What was asked for since the last look.
    pub(crate) fn take(&self) -> Vec<Errand> {
        // One that comes after this rings again.
        let _ = rustix::io::read(self.bell(), &mut [0; 8]);
        self.waiting.try_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_gets_the_answer() {
        let errands = Errands::new().unwrap();
        let asker = errands.asker();
        let asking = std::thread::spawn(move || asker.ask(Wish::Flush));
        let errand = loop {
            if let Some(errand) = errands.take().pop() {
                break errand;
            }
            std::thread::yield_now();
        };
        assert_eq!(errand.wish, Wish::Flush);
        errand.answer(Ok(7));
        assert_eq!(asking.join().unwrap(), Ok(7));
        assert!(errands.take().is_empty());
    }

    #[test]
    fn who_asks_after_the_end_is_told() {
        let errands = Errands::new().unwrap();
        let asker = errands.asker();
        drop(errands);
        assert!(asker.ask(Wish::Sleep).is_err());
    }
}
