package sdstest

// cases are the cases of the suite. Where a change of the source has to lead to nothing, another stream shows that it
// has got through.
const cases = `
case sotw: answer, acknowledge, push
set a 1
s ask a
s want a=1
s ack
set a 2
s want a=2
s ack
s quiet

case sotw: a pushed version is acknowledged and not answered
set a 1
s ask a
s want a=1
s ack
s ack
s ack
s quiet

case sotw: the same names again are not answered
set a 1
set b 1
s ask a b
s want a=1 b=1
s ask b a
s ask a b
s quiet

case sotw: two names
set a 1
set b 2
s ask a b
s want a=1 b=2
s quiet

case sotw: the type may be left out
set a 1
s send names=a type=none
s want a=1
s quiet

case sotw: another type is refused
s send names=a type=type.googleapis.com/envoy.config.cluster.v3.Cluster
s ends invalid_argument

case sotw: another type on a later request is refused
set a 1
s ask a
s want a=1
s send names=a nonce=last type=type.googleapis.com/envoy.config.listener.v3.Listener
s ends invalid_argument

case sotw: a stale nonce is ignored with its names
set a 1
set b 1
s ask a
s want a=1
s ack
set a 2
s want a=2
s send names=a,b nonce=prev
s send names=a,b nonce=bogus
s send names=a nonce=last
s quiet

case sotw: after a stale nonce the right one counts
set a 1
set b 1
s ask a
s want a=1
s ack
set a 2
s want a=2
s send names=b nonce=prev
s send names=a,b nonce=last
s want b=1
s ack
set a 3
s want a=3

case sotw: a stale rejection is none
set a 1
s ask a
s want a=1
s ack
set a 2
s want a=2
s send names=a nonce=prev error=no
s ack
set a 3
s want a=3

case sotw: a nonce on the first request is one of an older stream
set a 1
s send names=a nonce=17 version=old
s want a=1
s quiet

case sotw: a nonce before the first response is not stale
set b 1
s send names=a nonce=17
s send names=a,b nonce=17
s want b=1

case sotw: a first request may be a rejection of an older stream
set a 1
s send names=a nonce=17 error=no
s want a=1

case sotw: what the client says it has is sent all the same
set a 1
s ask a
s want a=1
s ack
s close
s send names=a version=last
s want a=1
s quiet

case sotw: a version that the server never gave
set a 1
s send names=a version=2006-01-02T15:04:05Z/17
s want a=1

case sotw: a rejected response is not sent again
set a 1
s ask a
s want a=1
s nack
s quiet

case sotw: the same content after a rejection is not sent
set a 1
s ask a
s want a=1
s nack
set a 1
p ask a
p want a=1
s quiet

case sotw: new content after a rejection is sent
set a 1
s ask a
s want a=1
s nack
set a 2
s want a=2
s ack
s quiet

case sotw: what was rejected is sent again after something else
set a 1
s ask a
s want a=1
s nack
set a 2
s want a=2
s ack
s close
s ask a
s want a=2
s ack
set a 1
s want a=1

case sotw: a change back after a rejection is sent
set a 1
s ask a
s want a=1
s ack
set a 2
s want a=2
s nack
set a 1
s want a=1
s ack
set a 2
s want a=2

case sotw: rejection after rejection
set a 1
s ask a
s want a=1
s nack
set a 2
s want a=2
s nack
set a 3
s want a=3
s nack
set a 4
s want a=4
s ack
s quiet

case sotw: a rejection twice
set a 1
s ask a
s want a=1
s nack
s send names=a nonce=last error=again
s quiet

case sotw: a rejection may change the names
set a 1
set b 1
s ask a
s want a=1
s send names=a,b nonce=last error=no
s want b=1
s quiet

case sotw: a rejection may drop the names
set a 1
s ask a
s want a=1
s send names=b nonce=last error=no
s barrier
set a 2
p ask a
p want a=2
set b 1
s want b=1

case sotw: what changed before a rejection comes after it
set a 1
set b 1
s ask a b
s want a=1 b=1
set b 2
s nack
s want b=2
s quiet

case sotw: a rejected name that is dropped and asked for again is sent again
set a 1
set b 1
s ask a b
s want a=1 b=1
s nack
s ask b
s ask a b
s want a=1
s quiet

case sotw: only what is added is answered
set a 1
set b 1
set c 1
s ask a
s want a=1
s ask a b
s want b=1
s ask b c
s want c=1
s ack
set a 2
p ask a
p want a=2
set b 2
s want b=2

case sotw: names may be added before the first answer is in
set a 1
set b 1
s send names=a
s send names=a,b
s want a=1 b=1
s quiet

case sotw: no names after names is nothing
set a 1
s ask a
s want a=1
s ask
s barrier
set a 2
p ask a
p want a=2
s quiet

case sotw: no names after names is nothing, where everything is something
wildcard a b
set a 1
set b 1
s ask a
s want a=1
s ask
s barrier
set a 2
set b 2
p ask a b
p want a=2 b=2
s quiet

case sotw: no names after names is not everything
wildcard a b
set a 1
set b 1
s ask a
s want a=1
s ask
p ask b
p want b=1
s quiet

case sotw: nothing, and then a name
set a 1
s ask a
s want a=1
s ask
s ask a
s want a=1
s quiet

case sotw: what is asked for again is sent again
set a 1
set b 1
s ask a b
s want a=1 b=1
s ask b
s ask a b
s want a=1
s quiet

case sotw: what is asked for again is sent as it is then
set a 1
set b 1
s ask a b
s want a=1 b=1
s ask b
s barrier
set a 2
p ask a
p want a=2
s ask a b
s want a=2

case sotw: everything is nothing, unless the server says otherwise
set a 1
s ask
s quiet

case sotw: everything by its name is nothing, unless the server says otherwise
set a 1
s ask *
s ask * a
s want a=1
s quiet

case sotw: everything, never having named anything
wildcard a b
set a 1
set b 1
set c 1
s ask
s want a=1 b=1
s ack
set b 2
s want b=2
s ack
set c 2
p ask c
p want c=2
s quiet

case sotw: names end everything
wildcard a b
set a 1
set b 1
set c 1
s ask
s want a=1 b=1
s ask c
s want c=1
s ack
set a 2
p ask a
p want a=2
s quiet

case sotw: everything by its name, and more
wildcard a b
set a 1
set b 1
set c 1
s ask c *
s want a=1 b=1 c=1
s ask c *
s quiet

case sotw: empty names are dropped
set a 1
s ask _ a _
s want a=1
s ask a _
s quiet

case sotw: empty names are not everything once there was a name
wildcard a
set a 1
set b 1
s ask b
s want b=1
s ask _
s barrier
s quiet

case sotw: a list of empty names names nothing
wildcard a
set a 1
s ask _ _
s want a=1

case sotw: duplicates are one
set a 1
s ask a a a
s want a=1
s ask a a
s quiet

case sotw: an unknown name does not hold up others
set a 1
s ask x a
s want a=1
s ack
s quiet

case sotw: an unknown name comes when it appears
s ask x
set x 1
s want x=1
s quiet

case sotw: an unknown name beside a known one comes when it appears
set a 1
s ask x a
s want a=1
s ack
set x 1
s want x=1

case sotw: a name that was dropped before it appeared does not come
set a 1
s ask x a
s want a=1
s ask a
s barrier
set x 1
p ask x
p want x=1
s quiet

case sotw: names of different kinds do not mix
set spiffe://example.org/web 1
set spiffe://example.org 2
set spiffe://example.org/web/ 3
s ask spiffe://example.org
s want spiffe://example.org=2
s quiet

case sotw: names are compared by byte
set A 1
set a 2
s ask A
s want A=1
s quiet

case sotw: a name of UTF-8
set größe/東京 1
s ask größe/東京
s want größe/東京=1

case sotw: a name that goes is not mentioned
set a 1
s ask a
s want a=1
s ack
set a -
d sub a
d sync ack
s quiet

case sotw: a name that comes back with other content is sent
set a 1
s ask a
s want a=1
s ack
set a -
set a 2
s want a=2
s quiet

case sotw: a stream that begins after a name has gone
set a 1
p ask a
p want a=1
set a -
s ask a
set a 2
s sync ack
s quiet

case sotw: the newest comes after many changes
set a 1
s ask a
s want a=1
set a 2
set a 3
set a 4
s sync ack
s quiet

case sotw: the newest of each name comes after many changes
set a 1
set b 1
s ask a b
s want a=1 b=1
set a 2
set b 2
set a 3
set b 3
s sync ack
s quiet

case sotw: a change while a name is being added
set a 1
set b 1
s ask a
s want a=1
set a 2
s ask a b
s sync ack
s quiet

case sotw: a change back and forth while a response is out
set a 1
s ask a
s want a=1
set a 2
set a 1
s sync ack

case sotw: a client that only acknowledges at the end
set a 1
set b 1
set c 1
s ask a
s want a=1
set a 2
set a 3
s send names=a,b nonce=last
s sync ack
s send names=a,b,c nonce=last
s sync ack
s quiet

case sotw: two streams are independent
set a 1
s ask a
t ask a
s want a=1
t want a=1
s nack
t ack
set a 2
s want a=2
t want a=2
s close
t ack
set a 3
t want a=3

case sotw: two streams with different names
set a 1
set b 1
s ask a
t ask b
s want a=1
t want b=1
s ack
t ack
set b 2
t want b=2
s quiet

case sotw: a stream that is not read holds up no other
set a 1
s ask a
t ask a
t want a=1
t ack
set a 2
t want a=2
t ack
set a 3
t want a=3
s sync ack

case sotw: reconnect
set a 1
set b 1
s ask a b
s want a=1 b=1
s ack
s close
s ask a b
s want a=1 b=1
s ack
set a 2
s want a=2

case sotw: reconnect after a rejection
set a 1
s ask a
s want a=1
s nack
s close
s ask a
s want a=1
s ack
s quiet

case sotw: reconnect after changes that were missed
set a 1
s ask a
s want a=1
s close
set a 2
set a 3
s ask a
s sync ack
s quiet

case sotw: reconnect without an answer to the last response
set a 1
s ask a
s want a=1
s ack
set a 2
s want a=2
s close
s ask a
s want a=2
s quiet

case sotw: a node on the first request only
set a 1
s send node=envoy names=a
s want a=1
s ack
set a 2
s want a=2

case sotw: no node at all
set a 1
s send names=a
s want a=1

case sotw: a node that changes
set a 1
s send node=one names=a
s want a=1
s send node=two names=a nonce=last
s quiet

case sotw: a stream without a request
s send
s quiet

case sotw: many names
set n1 1
set n50 2
set n100 3
s ask #100
s want n1=1 n50=2 n100=3
s quiet

case sotw: as many names as are allowed
maxnames 5
set n5 1
s ask #5
s want n5=1
s quiet

case sotw: too many names
maxnames 5
s ask #6
s ends resource_exhausted

case sotw: names are counted as they are wanted
maxnames 5
set n1 1
set n5 1
set m 1
s ask #5
s want n1=1 n5=1
s ask n1 n2 n3 n4 m
s want m=1
s quiet

case sotw: too many names later
maxnames 5
set n1 1
s ask n1
s want n1=1
s ask #6
s ends resource_exhausted

case sotw: what is not a message is refused
s raw garbage
s ends invalid_argument

case sotw: a bad stream harms no other
set a 1
t ask a
t want a=1
t ack
s raw garbage
s ends invalid_argument
set a 2
t want a=2

case sotw: a key pair
set a pair
s ask a
s want a=pair
s ack
set a otherpair
s want a=otherpair

case sotw: ticket keys
set a tickets
s ask a
s want a=tickets

case sotw: a generic secret
set a generic
s ask a
s want a=generic

case sotw: a generic secret with several values
set a values
s ask a
s want a=values

case sotw: trust domains
set a domains
s ask a
s want a=domains

case sotw: a secret that becomes another kind
set a 1
s ask a
s want a=1
s ack
set a pair
s want a=pair
s ack
set a domains
s want a=domains
s ack
set a 1
s want a=1

case delta: answer, acknowledge, push
set a 1
d sub a
d want a=1
d ack
set a 2
d want a=2
d ack
d quiet

case delta: an acknowledgement is not answered
set a 1
d sub a
d want a=1
d ack
d ack
d send
d quiet

case delta: the type may be left out
set a 1
d send sub=a type=none
d want a=1

case delta: another type is refused
d send sub=a type=type.googleapis.com/envoy.config.cluster.v3.Cluster
d ends invalid_argument

case delta: subscriptions add up
set a 1
set b 1
d sub a
d want a=1
d ack
d sub b
d want b=1
d ack
set a 2
d want a=2
d ack
set b 2
d want b=2

case delta: a subscription while a response is out
set a 1
set b 1
d sub a
d want a=1
d sub b
d ack
d want b=1

case delta: a second subscription is answered
set a 1
d sub a
d want a=1
d ack
d sub a
d want a=1
d quiet

case delta: a second subscription to what does not exist is answered
d sub x
d want -x
d ack
d sub x
d want -x
d quiet

case delta: subscribe, unsubscribe, subscribe
set a 1
d sub a
d want a=1
d ack
d unsub a
d sub a
d want a=1
d quiet

case delta: unsubscribed names do not come
set a 1
set b 1
d sub a b
d want a=1 b=1
d ack
d unsub a
d barrier
set a 2
p ask a
p want a=2
set b 2
d want b=2
d quiet

case delta: changes between unsubscribe and subscribe
set a 1
d sub a
d want a=1
d ack
d unsub a
d barrier
set a 2
p ask a
p want a=2
d sub a
d want a=2
d quiet

case delta: a stale nonce takes nothing from the subscription
set a 1
set b 1
set c 1
d sub a
d want a=1
d ack
set a 2
d want a=2
d send nonce=prev sub=b
d send nonce=bogus sub=c unsub=a
d ack
d want b=1 c=1
d ack
set a 3
p ask a
p want a=3
d quiet

case delta: a nonce on the first request
set a 1
d send nonce=17 sub=a
d want a=1
d quiet

case delta: an unknown name is removed at once
d sub x
d want -x
d ack
d quiet

case delta: unknown beside known
set a 1
d sub x a
d want a=1 -x
d ack
d quiet

case delta: an unknown name comes when it appears
d sub x
d want -x
d ack
set x 1
d want x=1
d ack
d quiet

case delta: a name goes
set a 1
d sub a
d want a=1
d ack
set a -
d want -a
d ack
d quiet

case delta: a name goes and comes back the same
set a 1
d sub a
d want a=1
d ack
set a -
d want -a
d ack
set a 1
d want a=1
d ack
d quiet

case delta: a name goes, and others stay
set a 1
set b 1
d sub a b
d want a=1 b=1
d ack
set a -
d want -a
d ack
set b 2
d want b=2

case delta: an unknown name that is unsubscribed does not come
set a 1
d sub x a
d want a=1 -x
d ack
d unsub x
d barrier
set x 1
p ask x
p want x=1
d quiet

case delta: a name that goes while a response is out
set a 1
d sub a
d want a=1
set a -
d sync ack
d quiet

case delta: the newest comes after many changes
set a 1
set b 1
d sub a b
d want a=1 b=1
set a 2
set b 2
set a 3
set b -
d sync ack
d quiet

case delta: versions brought along are not sent again
set a 1
set b 1
d sub a b
d want a=1 b=1
d ack
d close
set b 2
d send sub=a,b have=a,b
d want b=2
d ack
set a 2
d want a=2
d quiet

case delta: what the client brings and the server does not have is removed
set a 1
set b 1
d sub a b
d want a=1 b=1
d ack
d close
set b -
d send sub=a,b have=a,b
d want -b
d ack
d quiet

case delta: versions brought along that were never given
set a 1
d send sub=a have=a:1
d want a=1
d quiet

case delta: versions brought along for names that are not subscribed
set a 1
set b 1
d send sub=a have=b:1
d want a=1
d ack
d barrier
set b 2
p ask b
p want b=2
d quiet

case delta: versions on a later request are not believed
set a 1
set b 1
d sub a b
d want a=1 b=1
d ack
d close
d sub b
d want b=1
d ack
d send sub=a have=a
d want a=1
d quiet

case delta: a rejected response is not sent again
set a 1
d sub a
d want a=1
d nack
d quiet

case delta: the same content after a rejection is not sent
set a 1
d sub a
d want a=1
d nack
set a 1
p ask a
p want a=1
d quiet

case delta: new content after a rejection is sent
set a 1
d sub a
d want a=1
d nack
set a 2
d want a=2
d ack
d quiet

case delta: a change back after a rejection is sent
set a 1
d sub a
d want a=1
d ack
set a 2
d want a=2
d nack
set a 1
d want a=1
d ack
set a 2
d want a=2

case delta: a rejection with a subscription
set a 1
set b 1
d sub a
d want a=1
d send nonce=last error=no sub=b
d want b=1
d quiet

case delta: a rejection with an unsubscription
set a 1
d sub a
d want a=1
d send nonce=last error=no unsub=a
d barrier
set a 2
p ask a
p want a=2
d quiet

case delta: a rejected name that is subscribed again is sent again
set a 1
d sub a
d want a=1
d nack
d sub a
d want a=1
d quiet

case delta: what changed before a rejection comes after it
set a 1
set b 1
set c 1
d sub a b c
d want a=1 b=1 c=1
set b 2
set c -
d nack
d sync ack
d quiet

case delta: what was never subscribed is unsubscribed
set a 1
d unsub a b _
d sub a
d want a=1
d quiet

case delta: a name in both lists stays
set a 1
d send sub=a unsub=a
d want a=1
d ack
set a 2
d want a=2

case delta: duplicates and empty names are dropped
set a 1
d sub a _ a
d want a=1
d quiet

case delta: everything is nothing, unless the server says otherwise
set a 1
d send
d sub *
d want -*
d quiet

case delta: everything, having named nothing on the first request
wildcard a
set a 1
set b 1
d send
d want a=1
d ack
d send
d sub b
d want b=1
d quiet

case delta: everything by its name, and leaving it
wildcard a b
set a 1
set b 1
d sub *
d want a=1 b=1
d ack
d unsub *
d barrier
set a 2
set b 2
p ask a b
p want a=2 b=2
d quiet

case delta: a name that is part of everything stays
wildcard a b
set a 1
set b 1
d sub * a
d want a=1 b=1
d ack
d unsub a
d want a=1
d ack
set a 2
d want a=2

case delta: two streams are independent
set a 1
d sub a
d2 sub a
d want a=1
d2 want a=1
d ack
d2 ack
d unsub a
d barrier
set a 2
d2 want a=2
d quiet

case delta: a stream that is not read holds up no other
set a 1
d sub a
d2 sub a
d2 want a=1
d2 ack
set a 2
d2 want a=2
d2 ack
set a 3
d2 want a=3
d sync ack

case delta: reconnect with nothing brought along
set a 1
d sub a
d want a=1
d ack
d close
d sub a
d want a=1
d quiet

case delta: a node on the first request only
set a 1
d send node=envoy sub=a
d want a=1
d ack
set a 2
d want a=2

case delta: as many names as are allowed, over requests
maxnames 5
set n1 1
d sub n1 n2 n3
d want n1=1 -n2 -n3
d ack
d sub n4 n5
d want -n4 -n5
d quiet

case delta: too many names
maxnames 5
d sub #6
d ends resource_exhausted

case delta: room that was given back
maxnames 5
set n1 1
set m 1
d sub n1
d want n1=1
d ack
d unsub n1
d sub n2 n3 n4 n5 m
d want -n2 -n3 -n4 -n5 m=1
d quiet

case delta: what is not a message is refused
d raw garbage
d ends invalid_argument

case delta: a key pair
set a pair
d sub a
d want a=pair
d ack
set a otherpair
d want a=otherpair

case delta: every other kind
set a tickets
set b generic
set c values
set e domains
d sub a b c e
d want a=tickets b=generic c=values e=domains

case delta: beside state of the world
set a 1
s ask a
d sub a
s want a=1
d want a=1
s ack
d ack
set a 2
s want a=2
d want a=2
s nack
d ack
set a 3
s want a=3
d want a=3

case fetch: one name
set a 1
fetch a want a=1

case fetch: several names
set a 1
set b pair
fetch b a want a=1 b=pair

case fetch: the newest
set a 1
fetch a want a=1
set a 2
fetch a want a=2

case fetch: what exists is served beside what does not
set a 1
fetch x a want a=1

case fetch: duplicates and empty names
set a 1
fetch a _ a want a=1

case fetch: a name that does not exist
fetch x ends not_found

case fetch: a name that has gone
set a 1
fetch a want a=1
set a -
fetch a ends not_found

case fetch: no name
fetch _ ends invalid_argument

case fetch: another type
set a 1
fetch a type=type.googleapis.com/envoy.config.cluster.v3.Cluster ends invalid_argument

case fetch: a nonce and a version mean nothing
set a 1
fetch a nonce=17 version=old node=n want a=1
fetch a version=last want a=1

case fetch: every kind
set a tickets
set b generic
set c values
set d domains
fetch a b c d want a=tickets b=generic c=values d=domains

case fetch: too many names
maxnames 5
fetch #6 ends resource_exhausted

case fetch: beside a stream
set a 1
s ask a
s want a=1
fetch a want a=1
s ack
set a 2
s want a=2
fetch a want a=2
s ack
s quiet

case rest: one name
set a 1
rest a type=type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret want a=1

case rest: without a type
set a 1
rest a want a=1

case rest: every kind
set a pair
set b tickets
set c generic
set d values
set e domains
rest a b c d e want a=pair b=tickets c=generic d=values e=domains

case rest: the version that the client has
set a 1
rest a want a=1
rest a version=last status 304
set a 2
rest a version=last want a=2

case rest: a name that does not exist
rest x status 404

case rest: what exists is served beside what does not
set a 1
rest x a want a=1

case rest: no name
rest _ status 400

case rest: another type
set a 1
rest a type=type.googleapis.com/envoy.config.cluster.v3.Cluster status 400

case rest: too many names
maxnames 5
rest #6 status 413
`
