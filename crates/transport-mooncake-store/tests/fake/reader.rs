//! A reader of segments that lie in this process, and that fails on request.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use mooncake_sys::{SegmentRead, SegmentReader};
use parking_lot::Mutex;
use transport_core::{Error, ErrorKind, Result, SessionName};

/// What the next read comes to.
#[derive(Clone, Copy, Debug)]
pub enum Turn {
    /// It fails, with garbage in the destinations.
    Fail(ErrorKind),
    /// It takes this long.
    Slow(Duration),
    /// It never ends by itself.
    Hang,
}

#[derive(Debug, Default)]
pub struct FakeReader {
    pub turns: Mutex<VecDeque<Turn>>,
    /// How long each read takes at least.
    pub delay: Duration,
    pub calls: AtomicU64,
    pub segments: Mutex<Vec<String>>,
    pub closed: AtomicBool,
}

impl FakeReader {
    pub fn script(&self, turns: impl IntoIterator<Item = Turn>) {
        self.turns.lock().extend(turns);
    }

    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::SeqCst)
    }
}

impl SegmentReader for FakeReader {
    fn name(&self) -> &str {
        "a fake reader"
    }

    fn read(
        &self,
        segment: &SessionName,
        mut reads: Vec<SegmentRead>,
        deadline: Instant,
        stop: &Arc<AtomicBool>,
    ) -> (Vec<SegmentRead>, Result<()>) {
        assert!(!self.closed.load(Ordering::SeqCst), "no read after close");
        self.calls.fetch_add(1, Ordering::SeqCst);
        self.segments.lock().push(segment.to_string());
        std::thread::sleep(self.delay);
        let turn = self.turns.lock().pop_front();
        let fails = |kind| Err(Error::new(kind, "read segment", "scripted"));
        match turn {
            None => {}
            Some(Turn::Slow(time)) => std::thread::sleep(time),
            Some(Turn::Fail(kind)) => {
                for read in &mut reads {
                    read.dst.as_mut_bytes().unwrap().fill(0xEE);
                }
                return (reads, fails(kind));
            }
            Some(Turn::Hang) => {
                while !stop.load(Ordering::SeqCst) {
                    if Instant::now() >= deadline {
                        return (reads, fails(ErrorKind::Timeout));
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
                return (reads, fails(ErrorKind::Closed));
            }
        }
        for SegmentRead { address, dst } in &mut reads {
            let to = dst.as_mut_bytes().unwrap();
            // SAFETY: the fake store gives addresses of objects that it holds, as long as they are.
            // What removes an object under a reader is not tested with this one.
            let from = unsafe {
                let from = std::ptr::with_exposed_provenance::<u8>(address.0 as usize);
                std::slice::from_raw_parts(from, to.len())
            };
            to.copy_from_slice(from);
        }
        (reads, Ok(()))
    }

    fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }
}
