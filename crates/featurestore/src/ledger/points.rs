//! The moments at which a crash matters, so that tests can put one there.

use std::{fmt, sync::Arc};

/// A moment on the way of a sample from trained to settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Point {
    /// A transaction of the ledger is about to begin.
    BeforeCommit,
    /// Its statements are through; it is not on the disk.
    InsideCommit,
    /// It is on the disk.
    AfterCommit,
    /// The step is durable; nothing of it is freed.
    BeforeFree,
    /// Its samples are freed; the producer has not been told.
    BeforeSettle,
    /// The producer has been told.
    AfterSettle,
}

impl Point {
    /// All of them, in order.
    pub const ALL: [Self; 6] = [
        Self::BeforeCommit,
        Self::InsideCommit,
        Self::AfterCommit,
        Self::BeforeFree,
        Self::BeforeSettle,
        Self::AfterSettle,
    ];
}

/// Is told about each [`Point`] that is passed, on the thread that passes it. The default does
/// nothing.
#[derive(Clone, Default)]
pub struct Observer(Option<Arc<dyn Fn(Point) + Send + Sync>>);

impl Observer {
    /// Calls `observe` at each point.
    pub fn new(observe: impl Fn(Point) + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(observe)))
    }

    pub(crate) fn at(&self, point: Point) {
        if let Some(observe) = &self.0 {
            observe(point);
        }
    }
}

impl fmt::Debug for Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Observer(set)" } else { "Observer" })
    }
}
