//! Cases about what a transport says of itself, and how it ends.

use std::sync::Arc;

use super::{
    Pair,
    context::{
        PLAIN, Stop, Verdict, ensure, expect_error, fetch_and_check, fetch_one, fetch_options, key,
        meta, name, publication, publish, publish_options, publish_plain, release, release_now,
        settled,
    },
};
use crate::{
    Destination, ErrorKind, FetchRequest, Publication, Ready, RegionMut, ReleaseReport, Tensor,
};

pub(super) async fn empty_calls_do_nothing(pair: &mut Pair) -> Verdict {
    let before = pair.publisher.health().await?;
    let described = pair.publisher.publish(Vec::new(), publish_options()).await?;
    ensure!(described.is_empty(), "publishing nothing described {described:?}");
    let fetched = pair.consumer.fetch(Vec::new(), fetch_options()).await?;
    ensure!(fetched.is_empty(), "fetching nothing gave {fetched:?}");
    let report = pair.consumer.release(Vec::new()).await?;
    ensure!(report == ReleaseReport::default(), "releasing nothing reports {report:?}");
    let after = pair.publisher.health().await?;
    ensure!(
        (before.published_samples, before.released_samples, before.arena_free_bytes)
            == (after.published_samples, after.released_samples, after.arena_free_bytes),
        "counters moved from {before:?} to {after:?}"
    );
    Ok(())
}

pub(super) async fn health_counts_exactly(pair: &mut Pair) -> Verdict {
    let start = pair.publisher.health().await?;
    ensure!(
        start.resident_samples == 0 && start.resident_bytes == 0 && start.reserved_bytes == 0,
        "a fresh publisher is not empty: {start:?}"
    );
    let batch: Vec<_> = (0..5).map(|i| publication(&key(i), PLAIN, 1)).collect();
    let descriptors = publish(pair, batch).await?;
    let nbytes: u64 = descriptors[0].nbytes();
    let mut wanted = (5, 5 * nbytes, 5, 0); // resident samples and bytes, published, released
    let counts = |h: &crate::Health| {
        (
            h.resident_samples,
            h.resident_bytes,
            h.published_samples - start.published_samples,
            h.released_samples - start.released_samples,
        )
    };
    let after = pair.publisher.health().await?;
    ensure!(counts(&after) == wanted, "after 5 were published: {after:?}");
    if after.arena_bytes > 0 {
        let taken = start.arena_free_bytes - after.arena_free_bytes;
        ensure!(
            after.arena_bytes == start.arena_bytes && taken >= 5 * nbytes,
            "5 samples of {nbytes} bytes took {taken} bytes of the arena: {after:?}"
        );
        ensure!(
            after.arena_largest_free <= after.arena_free_bytes,
            "the largest free range is larger than all that is free: {after:?}"
        );
    }
    for descriptor in &descriptors {
        fetch_and_check(&pair.consumer, descriptor, 1).await?;
    }
    let held = pair.publisher.health().await?;
    ensure!(counts(&held) == wanted, "a fetch changed what is resident: {held:?}");
    for descriptor in &descriptors[..2] {
        release_now(&pair.consumer, descriptor).await?;
        wanted = (wanted.0 - 1, wanted.1 - nbytes, 5, wanted.3 + 1);
        settled("one less is resident", &pair.publisher, |h| counts(h) == wanted).await?;
    }
    let report = release(&pair.consumer, &[&descriptors[0]]).await?;
    ensure!(report.already_gone == 1, "released twice: {report:?}");
    let objects = PLAIN.len() as u64;
    settled("the second release is counted", &pair.publisher, |h| {
        counts(h) == wanted && h.duplicate_frees - start.duplicate_frees == objects
    })
    .await?;
    let rest: Vec<_> = descriptors[2..].iter().collect();
    let report = release(&pair.consumer, &rest).await?;
    ensure!(report.released == 3, "3 were held: {report:?}");
    settled("nothing is resident", &pair.publisher, |h| {
        counts(h) == (0, 0, 5, 5)
            && h.arena_free_bytes == start.arena_free_bytes
            && h.stale_frees == start.stale_frees
    })
    .await?;
    Ok(())
}

pub(super) async fn a_missing_capability_is_an_error(pair: &mut Pair) -> Verdict {
    let descriptor = publish_plain(pair, "capabilities", 1).await?;
    let before = pair.publisher.health().await?;
    let unsupported = &[ErrorKind::Unsupported];
    let mut missing = 0;
    for side in [&pair.publisher, &pair.consumer] {
        let info = side.info();
        if !info.capabilities.publish {
            missing += 1;
            let batch = vec![publication(&key("unsupported"), PLAIN, 1)];
            let what = format!("publishing through {}", info.scheme);
            expect_error(&what, side.publish(batch, publish_options()).await, unsupported, &[])?;
        }
        if !info.capabilities.fetch {
            missing += 1;
            let request = FetchRequest::new(descriptor.clone(), Destination::Pool);
            let what = format!("fetching through {}", info.scheme);
            expect_error(&what, fetch_one(side, request).await, unsupported, &[])?;
            let what = format!("releasing through {}", info.scheme);
            expect_error(&what, release(side, &[&descriptor]).await, unsupported, &[])?;
        } else if !info.capabilities.views {
            missing += 1;
            let request = FetchRequest::new(descriptor.clone(), Destination::View);
            let what = format!("viewing through {}", info.scheme);
            expect_error(&what, fetch_one(side, request).await, unsupported, &[])?;
        }
    }
    let after = pair.publisher.health().await?;
    ensure!(
        (before.host_payload_bytes, before.published_samples, before.arena_free_bytes)
            == (after.host_payload_bytes, after.published_samples, after.arena_free_bytes),
        "bytes moved for an unsupported call: {before:?}, then {after:?}"
    );
    fetch_and_check(&pair.consumer, &descriptor, 1).await?;
    release_now(&pair.consumer, &descriptor).await?;
    if missing == 0 {
        return Err(Stop::NotApplicable("both sides can do everything".into()));
    }
    Ok(())
}

pub(super) async fn device_memory_is_refused(pair: &mut Pair) -> Verdict {
    let before = pair.publisher.health().await?;
    let unsupported = &[ErrorKind::Unsupported];
    if !pair.publisher.info().capabilities.device_memory {
        let data = RegionMut::pretended_device(meta(&PLAIN[0]).nbytes() as usize)?.freeze();
        let tensors =
            [(name(PLAIN[0].0), Tensor::new(meta(&PLAIN[0]), data)?)].into_iter().collect();
        let sample = Publication::new(key("on a device"), tensors, Ready::Now);
        let result = pair.publisher.publish(vec![sample], publish_options()).await;
        expect_error("publishing device memory", result, unsupported, &[])?;
    }
    let descriptor = publish_plain(pair, "on the host", 1).await?;
    if !pair.consumer.info().capabilities.device_memory {
        let mut regions = Vec::new();
        for feature in descriptor.features.values() {
            regions.push(RegionMut::pretended_device(feature.meta.nbytes() as usize)?);
        }
        let request = FetchRequest::new(descriptor.clone(), Destination::Into(regions));
        let result = fetch_one(&pair.consumer, request).await;
        expect_error("fetching into device memory", result, unsupported, &[])?;
    }
    fetch_and_check(&pair.consumer, &descriptor, 1).await?;
    release_now(&pair.consumer, &descriptor).await?;
    settled("nothing is left", &pair.publisher, |h| {
        h.arena_free_bytes == before.arena_free_bytes && h.resident_samples == 0
    })
    .await?;
    Ok(())
}

pub(super) async fn close_ends_the_consumer(pair: &mut Pair) -> Verdict {
    if Arc::ptr_eq(&pair.publisher, &pair.consumer) {
        return Err(Stop::NotApplicable("publisher and consumer are one object".into()));
    }
    let descriptor = publish_plain(pair, "closing", 1).await?;
    fetch_and_check(&pair.consumer, &descriptor, 1).await?;
    pair.consumer.close().await?;
    pair.consumer.close().await?;
    let closed = &[ErrorKind::Closed];
    let request = FetchRequest::new(descriptor.clone(), Destination::Pool);
    expect_error("a fetch after close", fetch_one(&pair.consumer, request).await, closed, &[])?;
    let result = release(&pair.consumer, &[&descriptor]).await;
    expect_error("a release after close", result, closed, &[])?;
    expect_error("health after close", pair.consumer.health().await, closed, &[])?;
    // The publisher does not mind.
    publish_plain(pair, "still open", 1).await?;
    Ok(())
}

pub(super) async fn close_ends_the_publisher(pair: &mut Pair) -> Verdict {
    publish_plain(pair, "left behind", 1).await?;
    pair.publisher.close().await?;
    pair.publisher.close().await?;
    let closed = &[ErrorKind::Closed];
    let batch = vec![publication(&key("late"), PLAIN, 1)];
    let result = pair.publisher.publish(batch, publish_options()).await;
    expect_error("a publish after close", result, closed, &[])?;
    let result = pair.publisher.publish(Vec::new(), publish_options()).await;
    expect_error("a publish of nothing after close", result, closed, &[])?;
    expect_error("health after close", pair.publisher.health().await, closed, &[])?;
    Ok(())
}
