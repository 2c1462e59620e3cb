//! Tracing spans.

use std::{fmt, future::Future, sync::Arc};

use async_trait::async_trait;
use tracing::{Instrument, Span, field::Empty};

use super::{Layer, published_bytes};
use crate::{
    Descriptor, FetchOptions, FetchRequest, Fetched, Health, Publication, PublishOptions, Release,
    ReleaseReport, Result, Transport, TransportInfo,
};

/// Opens a span around each call, named after the method, and says how it ended.
///
/// Spans are of level `DEBUG` and have the fields `scheme`, `samples` and `bytes`, which `fetch`
/// records at its end. A call that fails leaves a `WARN` event with the error; its key and other
/// context are in the error's text. Tokens and payload are never recorded.
#[derive(Clone, Debug, Default)]
pub struct TraceLayer {
    _private: (),
}

impl TraceLayer {
    /// The layer; it has no settings, levels are filtered by the subscriber.
    pub fn new() -> Self {
        Self::default()
    }
}

impl Layer for TraceLayer {
    fn layer(&self, inner: Arc<dyn Transport>) -> Arc<dyn Transport> {
        Arc::new(Trace { inner })
    }
}

struct Trace {
    inner: Arc<dyn Transport>,
}

impl Trace {
    async fn run<T>(span: Span, call: impl Future<Output = Result<T>>) -> Result<T> {
        let call = async {
            let result = call.await;
            match &result {
                Ok(_) => tracing::debug!("done"),
                Err(error) => {
                    tracing::warn!(%error, temporary = error.is_temporary(), "failed");
                }
            }
            result
        };
        call.instrument(span).await
    }

    fn scheme(&self) -> &str {
        &self.inner.info().scheme
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Transport for Trace {
    fn info(&self) -> &TransportInfo {
        self.inner.info()
    }

    async fn publish(
        &self,
        batch: Vec<Publication>,
        options: PublishOptions,
    ) -> Result<Vec<Descriptor>> {
        let (samples, bytes) = (batch.len(), published_bytes(&batch));
        let span = tracing::debug_span!("publish", scheme = self.scheme(), samples, bytes);
        Self::run(span, self.inner.publish(batch, options)).await
    }

    async fn fetch(
        &self,
        requests: Vec<FetchRequest>,
        options: FetchOptions,
    ) -> Result<Vec<Fetched>> {
        let samples = requests.len();
        let span = tracing::debug_span!("fetch", scheme = self.scheme(), samples, bytes = Empty);
        let call = async {
            let fetched = self.inner.fetch(requests, options).await?;
            Span::current().record("bytes", fetched.iter().map(Fetched::nbytes).sum::<u64>());
            Ok(fetched)
        };
        Self::run(span, call).await
    }

    async fn release(&self, releases: Vec<Release>) -> Result<ReleaseReport> {
        let samples = releases.len();
        let span = tracing::debug_span!("release", scheme = self.scheme(), samples);
        Self::run(span, self.inner.release(releases)).await
    }

    async fn let_go(&self, samples: Vec<Arc<Descriptor>>) -> Result<()> {
        let span = tracing::debug_span!("let_go", scheme = self.scheme(), samples = samples.len());
        Self::run(span, self.inner.let_go(samples)).await
    }

    async fn health(&self) -> Result<Health> {
        let span = tracing::debug_span!("health", scheme = self.scheme());
        Self::run(span, self.inner.health()).await
    }

    async fn close(&self) -> Result<()> {
        let span = tracing::debug_span!("close", scheme = self.scheme());
        Self::run(span, self.inner.close()).await
    }
}

impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Trace({:?})", self.inner)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fmt::Write,
        sync::atomic::{AtomicU64, Ordering},
        time::Duration,
    };

    use parking_lot::Mutex;
    use tracing::{
        Event, Metadata, Subscriber,
        field::{Field, Visit},
        span,
    };

    use super::*;
    use crate::{
        ErrorKind,
        layers::{
            Operation,
            scripted::{Scripted, Step, call},
        },
    };

    /// Writes down spans, late fields and events.
    #[derive(Clone, Default)]
    struct Notes(Arc<Mutex<String>>, Arc<AtomicU64>);

    struct Line<'a>(&'a mut String);

    impl Visit for Line<'_> {
        fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
            write!(self.0, " {}={value:?}", field.name()).unwrap();
        }
    }

    impl Subscriber for Notes {
        fn enabled(&self, metadata: &Metadata<'_>) -> bool {
            metadata.target().starts_with("transport_core::layers::trace")
        }

        fn new_span(&self, attributes: &span::Attributes<'_>) -> span::Id {
            let mut text = self.0.lock();
            write!(text, "{}", attributes.metadata().name()).unwrap();
            attributes.record(&mut Line(&mut text));
            text.push('\n');
            span::Id::from_u64(self.1.fetch_add(1, Ordering::SeqCst) + 1)
        }

        fn record(&self, _: &span::Id, values: &span::Record<'_>) {
            let mut text = self.0.lock();
            values.record(&mut Line(&mut text));
            text.push('\n');
        }

        fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

        fn event(&self, event: &Event<'_>) {
            let mut text = self.0.lock();
            write!(text, "{}", event.metadata().level()).unwrap();
            event.record(&mut Line(&mut text));
            text.push('\n');
        }

        fn enter(&self, _: &span::Id) {}

        fn exit(&self, _: &span::Id) {}
    }

    #[tokio::test]
    async fn calls_are_spans_and_failures_are_warnings() {
        let notes = Notes::default();
        let _guard = tracing::subscriber::set_default(notes.clone());
        let steps = [Step::Succeed, Step::Succeed, Step::Succeed, Step::Fail(ErrorKind::Stale)];
        let transport = TraceLayer::new().layer(Scripted::new(steps));
        for operation in
            [Operation::Publish, Operation::Fetch, Operation::Release, Operation::Health]
        {
            let _ = call(&transport, operation, Duration::from_secs(1)).await;
        }
        let text = notes.0.lock().clone();
        for line in [
            "publish scheme=\"scripted\" samples=1 bytes=1000\n",
            "fetch scheme=\"scripted\" samples=1\n",
            "release scheme=\"scripted\" samples=1\n",
            "health scheme=\"scripted\"\n",
            "WARN message=failed error=health: stale: scripted temporary=false\n",
        ] {
            assert!(text.contains(line), "{line} is missing in\n{text}");
        }
        assert_eq!(text.matches("DEBUG message=done").count(), 3, "{text}");
    }
}
