//! Acknowledging step N while step N + 1 computes.

use std::{
    sync::mpsc::{Receiver, SyncSender, sync_channel},
    thread::JoinHandle,
};

use transport_core::{Error, ErrorKind, Result};

use super::{Acknowledger, Boundary, Step};

/// Name of the thread that acknowledges; at most 15 bytes, as the system shows no more.
const THREAD: &str = "fs-durable-ack";

/// An [`Acknowledger`] on a thread of its own. What is durable lags at most one step behind.
///
/// A failure is returned by the next call on the training thread, says which step it was, and ends
/// the acknowledging: no later step may become durable after one that did not.
#[derive(Debug)]
pub struct BackgroundAck {
    steps: Option<SyncSender<Step>>,
    outcomes: Receiver<Result<Boundary>>,
    thread: Option<JoinHandle<()>>,
    under_way: Option<u64>,
    newest: Option<Boundary>,
    failed: Option<u64>,
}

impl BackgroundAck {
    /// Starts the thread.
    pub fn start(mut acknowledger: Acknowledger) -> Result<Self> {
        Self::running(move |step| acknowledger.acknowledge(step))
    }

    pub(super) fn running(
        mut acknowledge: impl FnMut(&Step) -> Result<Boundary> + Send + 'static,
    ) -> Result<Self> {
        let (steps, incoming) = sync_channel::<Step>(1);
        let (done, outcomes) = sync_channel(1);
        let work = move || {
            for step in incoming {
                let outcome = acknowledge(&step);
                let failed = outcome.is_err();
                if done.send(outcome).is_err() || failed {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name(THREAD.into())
            .spawn(work)
            .map_err(|e| Error::io("start acknowledging", e))?;
        Ok(Self {
            steps: Some(steps),
            outcomes,
            thread: Some(thread),
            under_way: None,
            newest: None,
            failed: None,
        })
    }

    /// Hands a step over once the one before it is durable.
    pub fn submit(&mut self, step: Step) -> Result<()> {
        self.flush()?;
        let number = step.number;
        let sent = self.steps.as_ref().is_some_and(|steps| steps.send(step).is_ok());
        if !sent {
            return Err(ended());
        }
        self.under_way = Some(number);
        Ok(())
    }

    /// Waits until everything that was handed over is durable: before a checkpoint, an evaluation,
    /// and the end.
    pub fn flush(&mut self) -> Result<Option<&Boundary>> {
        if let Some(step) = self.failed {
            return Err(Error::new(
                ErrorKind::Closed,
                "background durable ack",
                "an earlier step has failed",
            )
            .with("step", step)
            .remedy("restart from the newest checkpoint"));
        }
        if let Some(step) = self.under_way.take() {
            match self.outcomes.recv() {
                Ok(Ok(boundary)) => self.newest = Some(boundary),
                Ok(Err(error)) => {
                    self.failed = Some(step);
                    return Err(error
                        .with("in", "the background durable ack")
                        .with("of_step", step));
                }
                Err(_) => {
                    self.failed = Some(step);
                    return Err(ended().with("of_step", step));
                }
            }
        }
        Ok(self.newest.as_ref())
    }

    /// The newest step that is known to be durable.
    pub fn durable(&self) -> Option<u64> {
        self.newest.as_ref().map(|boundary| boundary.step)
    }

    /// Waits for what is under way, and ends the thread.
    pub fn close(mut self) -> Result<()> {
        let outcome = self.flush().map(drop);
        self.end();
        outcome
    }

    fn end(&mut self) {
        self.steps = None; // the thread's loop ends
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic there has been printed
        }
    }
}

impl Drop for BackgroundAck {
    fn drop(&mut self) {
        self.end();
    }
}

fn ended() -> Error {
    Error::new(ErrorKind::Closed, "background durable ack", "the acknowledging thread has ended")
        .remedy("restart from the newest checkpoint")
}
