//! Reading under a lease.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use transport_core::{
    Descriptor, Destination, Error, ErrorKind, FeatureName, FetchOptions, FetchRequest, Result,
};

use super::{LeaseToken, Leased, Samples};

impl Samples {
    /// Reads one sample, whole, under a new lease.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] for what is freed, consumed, or was never adopted;
    /// [`ErrorKind::Stale`] for another generation or life. Then there is no lease.
    pub async fn get(&self, sample: &Arc<Descriptor>, deadline: Duration) -> Result<Leased> {
        self.get_names(sample, None, deadline).await
    }

    /// Reads some tensors of a sample under a new lease.
    pub async fn get_names(
        &self,
        sample: &Arc<Descriptor>,
        names: Option<Vec<FeatureName>>,
        deadline: Duration,
    ) -> Result<Leased> {
        let leased = self.get_leased(std::slice::from_ref(sample), names, deadline).await?;
        Ok(leased.into_iter().next().expect("one a sample"))
    }

    /// Reads samples under new leases, with one call of the transport: all or none.
    pub async fn get_many(
        &self,
        samples: &[Arc<Descriptor>],
        deadline: Duration,
    ) -> Result<Vec<Leased>> {
        self.get_leased(samples, None, deadline).await
    }

    async fn get_leased(
        &self,
        samples: &[Arc<Descriptor>],
        names: Option<Vec<FeatureName>>,
        deadline: Duration,
    ) -> Result<Vec<Leased>> {
        // A future that is dropped, and one that fails, leaves no lease behind.
        let mut leases = Vec::with_capacity(samples.len());
        for sample in samples {
            let token = self.books.lock().lease(sample, Instant::now())?;
            leases.push(Lease { samples: self, token: Some(token) });
        }
        let views = self.transport.info().capabilities.views;
        let destination = || if views { Destination::View } else { Destination::Pool };
        let request = |sample: &Arc<Descriptor>| {
            let mut request = FetchRequest::new(sample.clone(), destination());
            request.names.clone_from(&names);
            request
        };
        let requests = samples.iter().map(request).collect();
        let options = FetchOptions::default().deadline(deadline);
        let fetched = self.transport.fetch(requests, options).await?;
        if fetched.len() != samples.len() {
            return Err(Error::new(ErrorKind::Unexpected, "get", "not one answer for each sample")
                .with("expected", samples.len())
                .with("found", fetched.len()));
        }
        let leased = fetched.into_iter().zip(&mut leases).map(|(fetched, lease)| {
            let token = lease.token.take().expect("taken here only");
            Leased { fetched, token }
        });
        Ok(leased.collect())
    }
}

/// A sample that was read and that nobody has taken yet; dropped, its lease ends.
#[derive(Debug)]
pub(crate) struct Unclaimed {
    samples: Arc<Samples>,
    leased: Option<Leased>,
}

impl Unclaimed {
    pub(crate) fn new(samples: &Arc<Samples>, leased: Leased) -> Self {
        Self { samples: samples.clone(), leased: Some(leased) }
    }

    pub(crate) fn take(mut self) -> Leased {
        self.leased.take().expect("taken here only")
    }
}

impl Drop for Unclaimed {
    fn drop(&mut self) {
        if let Some(leased) = self.leased.take() {
            // As below.
            self.samples.books.lock().release(&leased.token);
        }
    }
}

/// A lease that ends unless it is handed on.
struct Lease<'a> {
    samples: &'a Samples,
    token: Option<LeaseToken>,
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        if let Some(token) = self.token.take() {
            // Without retention the sample is freed here and on its server at the next `gc`.
            self.samples.books.lock().release(&token);
        }
    }
}
