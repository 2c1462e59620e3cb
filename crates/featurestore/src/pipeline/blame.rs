//! Whose fault it is: who fails because another process of the run has died or is stopped knows only
//! of itself, and the other one is to be named.

use std::{os::unix::process::ExitStatusExt, time::Duration};

use tokio::process::Child;
use transport_core::{Error, ErrorKind};

use super::children::{Server, died};
use crate::process::{STOPPED, at_rest as resting};

/// How long after an error a death may be noticed that led to it.
pub(super) const SOON: Duration = Duration::from_millis(300);

/// A process that does nothing, by name, and why.
pub(super) type Resting = (String, &'static str);

/// The error to end with: `error`, unless it comes of a process that has died or is stopped.
pub(super) async fn of(
    error: Error,
    servers: &mut [Server],
    mut trainer: Option<(&mut Child, &str)>,
) -> Error {
    let killed = async {
        let Some((child, name)) = &mut trainer else { return std::future::pending().await };
        let status = child.wait().await;
        // One that ended by itself has failed, and that is the error.
        match status.as_ref().is_ok_and(|status| status.signal().is_some()) {
            true => died(name, status),
            false => std::future::pending().await,
        }
    };
    let dead = async {
        tokio::select! {
            dead = any_death(servers) => dead,
            dead = killed => dead,
        }
    };
    if let Ok(dead) = tokio::time::timeout(SOON, dead).await {
        return because(dead, &error);
    }
    let trainer = trainer.as_ref().map(|(child, name)| (&**child, *name));
    let resting = at_rest(servers, trainer);
    match resting.iter().find(|(_, state)| *state == STOPPED) {
        Some((name, state)) => because(stopped(name, state), &error),
        None => error,
    }
}

/// `cause`, and what came of it.
pub(super) fn because(cause: Error, error: &Error) -> Error {
    if cause.message() == error.message() { cause } else { cause.with("then", error) }
}

/// The error for a process that is stopped.
pub(super) fn stopped(name: &str, state: &str) -> Error {
    Error::new(ErrorKind::Timeout, "run pipeline", format!("{name} {state}"))
        .remedy("let it go on with SIGCONT, and run again")
}

/// What does nothing of what takes part.
pub(super) fn at_rest(servers: &[Server], trainer: Option<(&Child, &str)>) -> Vec<Resting> {
    let servers = servers.iter().filter_map(|s| Some((s.name.clone(), s.at_rest()?)));
    let trainer =
        trainer.and_then(|(child, name)| Some((name.to_owned(), child.id().and_then(resting)?)));
    servers.chain(trainer).collect()
}

/// Completes when any of the servers dies.
pub(super) async fn any_death(servers: &mut [Server]) -> Error {
    let mut deaths: Vec<_> = servers.iter_mut().map(|s| Box::pin(s.died())).collect();
    std::future::poll_fn(|context| {
        for death in &mut deaths {
            if let std::task::Poll::Ready(error) = death.as_mut().poll(context) {
                return std::task::Poll::Ready(error);
            }
        }
        std::task::Poll::Pending
    })
    .await
}

#[cfg(test)]
mod tests {
    use rustix::process::{Pid, Signal, kill_process};
    use tokio::process::Command;

    use super::*;

    /// What another says that a trainer failed of, and what the trainer did instead.
    #[tokio::test]
    async fn the_cause_comes_first_and_what_came_of_it_after() {
        for (signal, kind, says) in [
            (Signal::STOP, ErrorKind::Timeout, "the trainer is stopped"),
            (Signal::KILL, ErrorKind::PeerGone, "the trainer died: signal: 9"),
            (Signal::CONT, ErrorKind::Timeout, "no answer"),
        ] {
            let mut child = Command::new("sleep").arg("60").kill_on_drop(true).spawn().unwrap();
            let pid = child.id().and_then(|id| Pid::from_raw(id as i32)).unwrap();
            kill_process(pid, signal).unwrap();
            let error = Error::new(ErrorKind::Timeout, "fetch", "no answer");
            let error = of(error, &mut [], Some((&mut child, "the trainer"))).await;
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.message().starts_with(says), "{error}");
            assert!(error.to_string().contains("no answer"), "{error}");
        }
    }

    #[tokio::test]
    async fn who_ended_by_itself_has_said_why() {
        let mut child = Command::new("false").spawn().unwrap();
        let error = Error::new(ErrorKind::Timeout, "fetch", "no answer");
        let error = of(error, &mut [], Some((&mut child, "the trainer"))).await;
        assert_eq!(error.message(), "no answer");
    }
}
