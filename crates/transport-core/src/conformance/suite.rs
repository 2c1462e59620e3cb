//! The list of cases, and how one is run.

use std::{
    any::Any,
    fmt,
    future::{Future, poll_fn},
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
    sync::Arc,
    task::Poll,
    time::Duration,
};

use super::{
    Harness, Hook, Outcome, Pair, Setup,
    context::{Stop, Verdict},
};
use crate::{Capabilities, Transport};

/// How long each transport of a pair may take to close at the end of a case.
const CLOSE_BOUND: Duration = Duration::from_secs(10);

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// One case of the suite.
#[non_exhaustive]
pub struct Case {
    /// Unique, a valid Rust identifier.
    pub name: &'static str,
    /// What must hold.
    pub summary: &'static str,
    /// What the pair must be like.
    pub setup: Setup,
    /// What the transport and the harness must be able to do.
    pub needs: &'static [Need],
    body: for<'a> fn(&'a mut Pair) -> Pin<Box<dyn Future<Output = Verdict> + Send + 'a>>,
}

/// What a case cannot do without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Need {
    /// The publisher's health tells the size of an arena.
    Arena,
    /// The harness offers this hook.
    Hook(Hook),
    /// The consumer lacks [`Capabilities::device_memory`] or the publisher does.
    NoDeviceMemory,
    /// Both sides detect older lives: [`Capabilities::staleness_checked`].
    StalenessChecked,
    /// The consumer has [`Capabilities::views`].
    Views,
}

/// Every case, in the order in which [`run_all`](super::run_all) runs them.
pub fn cases() -> &'static [Case] {
    CASES
}

/// The case called `name`.
pub fn case(name: &str) -> Option<&'static Case> {
    CASES.iter().find(|c| c.name == name)
}

/// Runs the case called `name` and panics unless it passes, or does not apply and is listed in
/// `not_applicable`. [`conformance_tests!`](crate::conformance_tests) makes a test of each.
pub async fn assert_case(name: &str, harness: &dyn Harness, not_applicable: &[&str]) {
    let case = case(name).unwrap_or_else(|| panic!("{name} is not a case of the suite"));
    match case.run(harness).await {
        Outcome::Passed if not_applicable.contains(&name) => {
            panic!("{name} was not expected to apply to {}, but passed", harness.name())
        }
        Outcome::Passed => {}
        Outcome::NotApplicable(_) if not_applicable.contains(&name) => {}
        Outcome::NotApplicable(why) => {
            panic!("{name} should apply to {}, but: {why}", harness.name())
        }
        Outcome::Failed(why) => panic!("{name} ({}) fails on {harness:?}: {why}", case.summary),
    }
}

impl Case {
    /// Runs the case over a fresh pair and closes it. Never panics and never takes longer than
    /// [`Harness::case_timeout`] and the time that dropping the pair takes.
    pub async fn run(&self, harness: &dyn Harness) -> Outcome {
        for need in self.needs {
            if let Need::Hook(hook) = need
                && !harness.offers(*hook)
            {
                return Outcome::NotApplicable(format!("the harness does not offer {hook:?}"));
            }
        }
        let limit = harness.case_timeout();
        let run = catch_panic(self.run_on_pair(harness));
        match tokio::time::timeout(limit, run).await {
            Ok(Ok(Ok(()))) => Outcome::Passed,
            Ok(Ok(Err(Stop::Failed(why)))) => Outcome::Failed(why),
            Ok(Ok(Err(Stop::NotApplicable(why)))) => Outcome::NotApplicable(why),
            Ok(Err(panic)) => Outcome::Failed(format!("panicked: {panic}")),
            Err(_) => Outcome::Failed(format!("did not end within {limit:?}")),
        }
    }

    async fn run_on_pair(&self, harness: &dyn Harness) -> Verdict {
        let mut pair = harness
            .pair(&self.setup)
            .await
            .map_err(|e| Stop::Failed(format!("the harness cannot make a pair: {e:?}")))?;
        for need in self.needs {
            need.check(&pair).await?;
        }
        let may_be_killed = self.needs.contains(&Need::Hook(Hook::KillPublisher));
        let verdict = (self.body)(&mut pair).await;
        let closed = close(&pair, may_be_killed).await;
        verdict.and(closed)
    }
}

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Case")
            .field("name", &self.name)
            .field("summary", &self.summary)
            .field("setup", &self.setup)
            .field("needs", &self.needs)
            .finish_non_exhaustive()
    }
}

impl Need {
    async fn check(self, pair: &Pair) -> Verdict {
        let lacks = |side: &Arc<dyn Transport>, has: fn(&Capabilities) -> bool| {
            (!has(&side.info().capabilities)).then(|| side.info().scheme.clone())
        };
        let (publisher, consumer) = (&pair.publisher, &pair.consumer);
        let missing = match self {
            Self::Arena => (publisher.health().await?.arena_bytes == 0)
                .then(|| "the publisher has no arena of a known size".into()),
            Self::Hook(Hook::SecondConsumer) => {
                pair.second_consumer.is_none().then(|| "the pair has no second consumer".into())
            }
            Self::Hook(Hook::KillPublisher) => {
                pair.kill_publisher.is_none().then(|| "the pair cannot kill its publisher".into())
            }
            Self::Hook(_) => None, // asked of the harness
            Self::NoDeviceMemory => (lacks(publisher, |c| c.device_memory).is_none()
                && lacks(consumer, |c| c.device_memory).is_none())
            .then(|| "both sides take device memory".into()),
            Self::StalenessChecked => lacks(publisher, |c| c.staleness_checked)
                .or_else(|| lacks(consumer, |c| c.staleness_checked))
                .map(|scheme| format!("{scheme} does not check staleness")),
            Self::Views => {
                lacks(consumer, |c| c.views).map(|scheme| format!("{scheme} gives no views"))
            }
        };
        missing.map_or(Ok(()), |why| Err(Stop::NotApplicable(why)))
    }
}

async fn close(pair: &Pair, publisher_may_be_gone: bool) -> Verdict {
    let consumers = pair.second_consumer.iter().chain([&pair.consumer]);
    for (side, may_fail) in
        consumers.map(|c| (c, false)).chain([(&pair.publisher, publisher_may_be_gone)])
    {
        match tokio::time::timeout(CLOSE_BOUND, side.close()).await {
            Ok(Err(_)) if may_fail => {}
            Ok(Ok(())) => {}
            Ok(Err(e)) => return Err(Stop::Failed(format!("close at the end failed: {e:?}"))),
            Err(_) => {
                return Err(Stop::Failed(format!(
                    "close at the end did not return within {CLOSE_BOUND:?}: {side:?}"
                )));
            }
        }
    }
    Ok(())
}

/// Awaits `future`; a panic inside becomes its message.
async fn catch_panic<T>(future: impl Future<Output = T>) -> Result<T, String> {
    let mut future = pin!(future);
    poll_fn(move |cx| {
        // A future that panicked is never polled again, so what it left behind is only dropped.
        match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(cx))) {
            Ok(Poll::Pending) => Poll::Pending,
            Ok(Poll::Ready(output)) => Poll::Ready(Ok(output)),
            Err(panic) => Poll::Ready(Err(panic_message(&*panic))),
        }
    })
    .await
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(ToString::to_string)
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".into())
}

/// Makes the list of cases and the macro of one test per case from one table.
macro_rules! suite {
    (($d:tt) $(
        $module:ident::$name:ident: $summary:literal, $setup:expr $(, needs $($need:expr),+)?;
    )*) => {
        static CASES: &[Case] = &[$(Case {
            name: stringify!($name),
            summary: $summary,
            setup: $setup,
            needs: &[$($($need),+)?],
            body: |pair| Box::pin(super::$module::$name(pair)),
        }),*];

        /// Makes one `#[tokio::test]` per case of the [conformance suite](crate::conformance).
        ///
        /// Takes an expression that gives a [`Harness`](crate::conformance::Harness), evaluated in
        /// each test, and the names of the cases that are expected not to apply. The calling crate
        /// needs tokio with `macros` and `rt-multi-thread`.
        ///
        /// ```ignore
        /// mod conformance {
        ///     transport_core::conformance_tests!(super::MyHarness, not_applicable: ["views_share_memory"]);
        /// }
        /// ```
        #[macro_export]
        macro_rules! conformance_tests {
            ($d harness:expr, not_applicable: [$d($d absent:literal),* $d(,)?]) => {$(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $name() {
                    let harness = $d harness;
                    $crate::conformance::assert_case(
                        stringify!($name),
                        &harness,
                        &[$d($d absent),*],
                    )
                    .await;
                }
            )*};
        }
    };
}

/// An arena with room for everything that most cases publish.
const ROOMY: Setup = Setup::new(4 * MIB);
/// An arena that a few tensors fill.
const SMALL: Setup = Setup::new(256 * KIB);

suite! { ($)
    lifecycle::empty_calls_do_nothing:
        "publish, fetch and release of nothing succeed and count nothing", ROOMY;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_found() {
        for c in cases() {
            assert!(std::ptr::eq(case(c.name).unwrap(), c), "{} appears twice", c.name);
            assert!(!c.summary.is_empty());
        }
        assert!(case("no such case").is_none());
    }

    #[tokio::test]
    async fn a_panic_becomes_its_message() {
        assert_eq!(catch_panic(async { 1 }).await, Ok(1));
        let caught = catch_panic(async { panic!("boo {}", 7) }).await;
        assert_eq!(caught, Err::<(), _>("boo 7".into()));
    }
}
