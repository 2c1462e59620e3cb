//! Simulated streams and events: work waits until somebody waits for it.

use std::collections::{HashMap, VecDeque};

use super::{Kernel, State};
use crate::cuda::{CudaError, CudaResult, DevicePtr, EventId, KernelArg, Launch, StreamId};

/// All streams and events of one stand-in.
#[derive(Default)]
pub(super) struct Work {
    streams: HashMap<u64, Queue>,
    events: HashMap<u64, Point>,
    last: u64,
    clock: u64,          // counts what has run
    broken: Option<u32>, // a device that faulted answers nothing else any more
}

struct Queue {
    device: u32,
    waiting: VecDeque<Op>,
}

struct Point {
    device: u32,
    timed: bool,
    recorded: u64, // how often
    done: u64,     // up to which of those
    last_on: u64,  // stream
    at: u64,       // clock
}

pub(super) enum Op {
    Copy { dst: DevicePtr, src: DevicePtr, len: u64 },
    Fill { at: DevicePtr, byte: u8, len: u64 },
    Kernel { kernel: Kernel, launch: Launch, args: Vec<KeptArg> },
    Record { event: u64, which: u64 },
    Wait { event: u64, which: u64, on: u64 },
}

/// A kernel's argument, until it runs.
pub(super) enum KeptArg {
    U64(u64),
    U32(u32),
    Bytes(Vec<u8>),
}

impl KeptArg {
    pub(super) fn of(arg: &KernelArg<'_>) -> Self {
        match *arg {
            KernelArg::U64(value) => Self::U64(value),
            KernelArg::U32(value) => Self::U32(value),
            KernelArg::Bytes(bytes) => Self::Bytes(bytes.to_vec()),
        }
    }

    fn borrow(&self) -> KernelArg<'_> {
        match self {
            Self::U64(value) => KernelArg::U64(*value),
            Self::U32(value) => KernelArg::U32(*value),
            Self::Bytes(bytes) => KernelArg::Bytes(bytes),
        }
    }
}

impl Work {
    pub(super) fn leaks(&self) -> Vec<String> {
        let streams = self.streams.keys().map(|id| format!("stream {id}"));
        streams.chain(self.events.keys().map(|id| format!("event {id}"))).collect()
    }

    pub(super) fn new_stream(&mut self, device: u32) -> StreamId {
        self.last += 1;
        self.streams.insert(self.last, Queue { device, waiting: VecDeque::new() });
        StreamId(self.last)
    }

    pub(super) fn new_event(&mut self, device: u32, timed: bool) -> EventId {
        self.last += 1;
        let point = Point { device, timed, recorded: 0, done: 0, last_on: 0, at: 0 };
        self.events.insert(self.last, point);
        EventId(self.last)
    }

    pub(super) fn forget_stream(&mut self, stream: StreamId) {
        self.streams.remove(&stream.0);
    }

    pub(super) fn end_event(&mut self, call: &'static str, event: EventId) -> CudaResult<()> {
        self.events.remove(&event.0).map(drop).ok_or_else(|| invalid(call))
    }

    pub(super) fn of_device(&self, device: u32) -> Vec<StreamId> {
        let of_device = self.streams.iter().filter(|(_, queue)| queue.device == device);
        of_device.map(|(id, _)| StreamId(*id)).collect()
    }

    pub(super) fn push(
        &mut self,
        call: &'static str,
        stream: StreamId,
        device: u32,
        op: Op,
    ) -> CudaResult<()> {
        self.check()?;
        let queue = self.streams.get_mut(&stream.0).ok_or_else(|| invalid(call))?;
        if queue.device != device {
            return Err(CudaError::new(call, CudaError::INVALID_CONTEXT));
        }
        queue.waiting.push_back(op);
        Ok(())
    }

    pub(super) fn record(
        &mut self,
        call: &'static str,
        event: EventId,
        stream: StreamId,
    ) -> CudaResult<()> {
        let queue = self.streams.get_mut(&stream.0).ok_or_else(|| invalid(call))?;
        let point = self.events.get_mut(&event.0).ok_or_else(|| invalid(call))?;
        if point.device != queue.device {
            return Err(invalid(call));
        }
        point.recorded += 1;
        point.last_on = stream.0;
        queue.waiting.push_back(Op::Record { event: event.0, which: point.recorded });
        Ok(())
    }

    pub(super) fn wait_for(
        &mut self,
        call: &'static str,
        stream: StreamId,
        event: EventId,
    ) -> CudaResult<()> {
        let point = self.events.get(&event.0).ok_or_else(|| invalid(call))?;
        let (which, on) = (point.recorded, point.last_on);
        let queue = self.streams.get_mut(&stream.0).ok_or_else(|| invalid(call))?;
        queue.waiting.push_back(Op::Wait { event: event.0, which, on });
        Ok(())
    }

    /// Where the newest record of an event stands: stream and number; none if it has happened.
    pub(super) fn pending(
        &self,
        call: &'static str,
        event: EventId,
    ) -> CudaResult<Option<(StreamId, u64)>> {
        let point = self.events.get(&event.0).ok_or_else(|| invalid(call))?;
        Ok((point.done < point.recorded).then_some((StreamId(point.last_on), point.recorded)))
    }

    pub(super) fn elapsed(&self, start: EventId, end: EventId) -> CudaResult<f32> {
        const CALL: &str = "cuEventElapsedTime";
        let point = |event: EventId| self.events.get(&event.0).filter(|point| point.timed);
        let (start, end) = point(start).zip(point(end)).ok_or_else(|| invalid(CALL))?;
        if start.done < start.recorded.max(1) || end.done < end.recorded.max(1) {
            return Err(CudaError::new(CALL, CudaError::NOT_READY));
        }
        Ok(end.at.saturating_sub(start.at) as f32 / 1000.0) // a microsecond a step
    }

    pub(super) fn is_idle(&self, call: &'static str, stream: StreamId) -> CudaResult<bool> {
        self.check()?;
        let queue = self.streams.get(&stream.0).ok_or_else(|| invalid(call))?;
        Ok(queue.waiting.is_empty())
    }

    pub(super) fn check(&self) -> CudaResult<()> {
        self.broken.map_or(Ok(()), |code| Err(CudaError::new("work", code)))
    }

    fn next(&mut self, stream: StreamId) -> Option<Op> {
        self.streams.get_mut(&stream.0)?.waiting.pop_front()
    }

    fn is_past(&self, event: u64, which: u64) -> bool {
        self.events.get(&event).is_none_or(|point| point.done >= which)
    }
}

impl State {
    /// Runs a stream's work until it is done, or until that record of an event is.
    pub(super) fn run(&mut self, stream: StreamId, until: Option<(u64, u64)>) -> CudaResult<()> {
        loop {
            if until.is_some_and(|(event, which)| self.work.is_past(event, which)) {
                return Ok(());
            }
            if !self.step(stream)? {
                return Ok(());
            }
        }
    }

    /// Runs one piece of work; false if there is none. A piece that fails breaks the device.
    pub(super) fn step(&mut self, stream: StreamId) -> CudaResult<bool> {
        self.work.check()?;
        let Some(op) = self.work.next(stream) else { return Ok(false) };
        self.work.clock += 1;
        let is_work = !matches!(op, Op::Record { .. } | Op::Wait { .. });
        let scripted = if is_work { self.enter("work") } else { Ok(()) };
        let ran = scripted.and_then(|()| match op {
            Op::Copy { dst, src, len } => self.space.memory().copy(dst, src, len),
            Op::Fill { at, byte, len } => self.space.memory().write(at, &vec![byte; len as usize]),
            Op::Kernel { kernel, launch, args } => {
                let args: Vec<_> = args.iter().map(KeptArg::borrow).collect();
                kernel(&mut self.space.memory(), launch, &args)
            }
            Op::Record { event, which } => {
                let clock = self.work.clock;
                if let Some(point) = self.work.events.get_mut(&event) {
                    (point.done, point.at) = (point.done.max(which), clock);
                }
                Ok(())
            }
            Op::Wait { event, which, on } if which > 0 => {
                self.run(StreamId(on), Some((event, which)))
            }
            Op::Wait { .. } => Ok(()),
        });
        if let Err(error) = &ran {
            self.work.broken.get_or_insert(error.code);
        }
        ran.map(|()| true)
    }
}

fn invalid(call: &'static str) -> CudaError {
    CudaError::new(call, CudaError::INVALID_HANDLE)
}
