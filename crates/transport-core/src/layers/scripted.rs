//! A transport for tests of layers that does what it is told.

use std::{fmt, sync::Arc, time::Duration};

use async_trait::async_trait;
use indexmap::IndexMap;
use parking_lot::Mutex;

use super::Operation;
use crate::{
    Capabilities, Descriptor, Destination, Dtype, Error, ErrorKind, FeatureDescriptor, FeatureName,
    FetchOptions, FetchRequest, Fetched, Generation, Health, Location, Publication, PublishOptions,
    Ready, RegionSlice, Release, ReleaseReport, Result, SampleId, SampleKey, StoreId, Tensor,
    TensorMeta, Transport, TransportInfo,
};

/// What one call does.
#[derive(Clone, Debug)]
pub(super) enum Step {
    Succeed,
    Fail(ErrorKind),
    Delay(Duration),
    Hang,
}

/// Follows its steps one call after the other, whatever the operation, then the last one for ever.
pub(super) struct Scripted {
    steps: Vec<Step>,
    seen: Mutex<Seen>,
    info: TransportInfo,
}

#[derive(Default)]
struct Seen {
    calls: Vec<Operation>,
    deadlines: Vec<Duration>,
    running: usize,
    most_running: usize,
    dropped: usize,
}

impl Scripted {
    pub(super) fn new(steps: impl Into<Vec<Step>>) -> Arc<Self> {
        let info = TransportInfo::new("scripted", "test", Capabilities::default());
        Arc::new(Self { steps: steps.into(), seen: Mutex::default(), info })
    }

    pub(super) fn always(step: Step) -> Arc<Self> {
        Self::new([step])
    }

    pub(super) fn calls(&self) -> Vec<Operation> {
        self.seen.lock().calls.clone()
    }

    /// Deadlines of the calls that had one.
    pub(super) fn deadlines(&self) -> Vec<Duration> {
        self.seen.lock().deadlines.clone()
    }

    pub(super) fn most_running(&self) -> usize {
        self.seen.lock().most_running
    }

    /// Calls that were dropped before they ended.
    pub(super) fn dropped(&self) -> usize {
        self.seen.lock().dropped
    }

    async fn step(&self, operation: Operation, deadline: Option<Duration>) -> Result<()> {
        struct Running<'a>(&'a Scripted, bool);
        impl Drop for Running<'_> {
            fn drop(&mut self) {
                let mut seen = self.0.seen.lock();
                seen.running -= 1;
                seen.dropped += usize::from(!self.1);
            }
        }
        let index = {
            let mut seen = self.seen.lock();
            seen.calls.push(operation);
            seen.deadlines.extend(deadline);
            seen.running += 1;
            seen.most_running = seen.most_running.max(seen.running);
            seen.calls.len() - 1
        };
        let mut running = Running(self, false);
        let result = match self.steps[index.min(self.steps.len() - 1)] {
            Step::Succeed => Ok(()),
            Step::Fail(kind) => Err(Error::new(kind, operation.name(), "scripted")),
            Step::Delay(time) => {
                tokio::time::sleep(time).await;
                Ok(())
            }
            Step::Hang => std::future::pending().await,
        };
        running.1 = true;
        result
    }
}

#[async_trait]
impl Transport for Scripted {
    fn info(&self) -> &TransportInfo {
        &self.info
    }

    async fn publish(
        &self,
        batch: Vec<Publication>,
        options: PublishOptions,
    ) -> Result<Vec<Descriptor>> {
        self.step(Operation::Publish, Some(options.deadline)).await?;
        Ok(batch.iter().map(|_| (*descriptor()).clone()).collect())
    }

    async fn fetch(
        &self,
        requests: Vec<FetchRequest>,
        options: FetchOptions,
    ) -> Result<Vec<Fetched>> {
        self.step(Operation::Fetch, Some(options.deadline)).await?;
        let fetched =
            requests.into_iter().map(|request| Fetched::new(request.descriptor, tensors(), true));
        Ok(fetched.collect())
    }

    async fn release(&self, releases: Vec<Release>) -> Result<ReleaseReport> {
        self.step(Operation::Release, None).await?;
        Ok(ReleaseReport { released: releases.len() as u64, ..ReleaseReport::default() })
    }

    async fn let_go(&self, _: Vec<Arc<Descriptor>>) -> Result<()> {
        Ok(())
    }

    async fn health(&self) -> Result<Health> {
        self.step(Operation::Health, None).await?;
        Ok(Health::default())
    }

    async fn close(&self) -> Result<()> {
        self.step(Operation::Close, None).await
    }
}

impl fmt::Debug for Scripted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Scripted")
    }
}

/// Bytes of the one sample that scripted transports know.
pub(super) const SAMPLE_BYTES: u64 = 1000;

fn tensors() -> IndexMap<FeatureName, Tensor> {
    let meta = TensorMeta::new(Dtype::Uint8, [SAMPLE_BYTES]).unwrap();
    let data = RegionSlice::copy_of(&[7; SAMPLE_BYTES as usize]);
    [(FeatureName::new("x").unwrap(), Tensor::new(meta, data).unwrap())].into_iter().collect()
}

pub(super) fn publication() -> Publication {
    Publication::new(descriptor().sample.clone(), tensors(), Ready::Now)
}

pub(super) fn descriptor() -> Arc<Descriptor> {
    let sample =
        SampleKey::new(StoreId::new("s").unwrap(), SampleId::new("a").unwrap(), Generation(1));
    let features = tensors()
        .into_iter()
        .map(|(name, tensor)| (name, FeatureDescriptor::new(tensor.meta, None, None)))
        .collect();
    Arc::new(Descriptor::new(sample, features, None, Location::Store).unwrap())
}

/// Calls one operation with one sample, fetched into the pool.
pub(super) async fn call(
    transport: &Arc<dyn Transport>,
    operation: Operation,
    deadline: Duration,
) -> Result<()> {
    match operation {
        Operation::Publish => {
            let options = PublishOptions::default().deadline(deadline);
            transport.publish(vec![publication()], options).await.map(drop)
        }
        Operation::Fetch => {
            let options = FetchOptions::default().deadline(deadline);
            let request = FetchRequest::new(descriptor(), Destination::Pool);
            transport.fetch(vec![request], options).await.map(drop)
        }
        Operation::Release => transport.release(vec![descriptor().into()]).await.map(drop),
        Operation::Health => transport.health().await.map(drop),
        Operation::Close => transport.close().await,
    }
}
