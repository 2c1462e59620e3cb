//! Cases about what a transport says of itself, and how it ends.

use super::{
    Pair,
    context::{Verdict, ensure, fetch_options, publish_options},
};
use crate::ReleaseReport;

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
