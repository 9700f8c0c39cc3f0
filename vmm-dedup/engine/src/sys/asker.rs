//! A thread that asks the kernel what may take long, or wait for somebody: whoever holds something back meanwhile waits for its
//! answer no longer than he wants to.

use crate::seccomp::Part;
use crate::sys::sched::Urgent;
use crate::sys::thread;
use std::io;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoAnswer {
    /// It takes longer, or an earlier question does still.
    Late,
    /// The thread has died.
    Ended,
}

/// The thread that asks.
#[derive(Debug)]
pub(crate) struct Asker<Q, A> {
    questions: Sender<Q>,
    answers: Receiver<A>,
    /// An answer that nobody waited for any more is still to come.
    late: bool,
}

impl<Q: Send + 'static, A: Send + 'static> Asker<Q, A> {
    /// Starts the thread. It ends when nobody can ask any more, or with the answer that it is about then.
    ///
    /// # Errors
    /// Those of the kernel.
    pub(crate) fn start(mut answer: impl FnMut(Q) -> A + Send + 'static) -> io::Result<Self> {
        let (asker, asked, tell) = Self::unanswered();
        thread::spawn(Part::Count, move || {
            let _urgent = Urgent::begin();
            while let Ok(question) = asked.recv() {
                if tell.send(answer(question)).is_err() {
                    return;
                }
            }
        })?;
        Ok(asker)
    }

    /// One whose questions somebody has to answer.
    pub(crate) fn unanswered() -> (Self, Receiver<Q>, Sender<A>) {
        let (questions, asked) = mpsc::channel();
        let (tell, answers) = mpsc::channel();
        let asker = Self {
            questions,
            answers,
            late: false,
        };
        (asker, asked, tell)
    }

    /// The answer, if it comes within so much time.
    ///
    /// # Errors
    /// Why there is none.
    pub(crate) fn ask(&mut self, question: Q, within: Duration) -> Result<A, NoAnswer> {
        if self.late {
            self.answers.try_recv().map_err(|_| NoAnswer::Late)?;
            self.late = false;
        }
        self.questions.send(question).map_err(|_| NoAnswer::Ended)?;
        self.answers.recv_timeout(within).map_err(|error| match error {
            RecvTimeoutError::Timeout => {
                self.late = true;
                NoAnswer::Late
            }
            RecvTimeoutError::Disconnected => NoAnswer::Ended,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_waits_longer_than_he_wants_and_a_late_answer_is_not_the_next_one() {
        let (mut asker, asked, tell) = Asker::<u32, u32>::unanswered();
        let within = Duration::from_millis(1);
        assert_eq!(asker.ask(1, within), Err(NoAnswer::Late));
        assert_eq!(asker.ask(2, within), Err(NoAnswer::Late));
        assert_eq!(
            asked.try_iter().collect::<Vec<_>>(),
            [1],
            "one question at a time"
        );
        tell.send(10).unwrap();
        tell.send(30).unwrap();
        assert_eq!(asker.ask(3, within), Ok(30));
    }

    #[test]
    fn who_answers_no_more_is_not_waited_for() {
        let mut asker = Asker::start(|n: u32| 10 / n).unwrap();
        let within = Duration::from_secs(60);
        assert_eq!(asker.ask(5, within), Ok(2));
        assert_eq!(asker.ask(0, within), Err(NoAnswer::Ended));
        assert_eq!(asker.ask(5, within), Err(NoAnswer::Ended));
    }
}
