// Talks to a server with go-redis; run by kv_clients. Argument: port.
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand"
	"os"
	"reflect"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

var (
	ctx    = context.Background()
	checks atomic.Int64
)

// Fails with the place it was called from.
func fail(format string, args ...any) {
	fmt.Fprintf(os.Stderr, format+"\n", args...)
	debug.PrintStack()
	os.Exit(1)
}

func same(got, expected any) {
	checks.Add(1)
	if !reflect.DeepEqual(got, expected) {
		fail("%.300v instead of %.300v", got, expected)
	}
}

// The value of a command that must succeed.
func of[T any](value T, err error) T {
	if err != nil {
		fail("%v", err)
	}
	return value
}

func fails(text string, err error) {
	checks.Add(1)
	if err == nil || !strings.Contains(err.Error(), text) {
		fail("%v instead of an error with '%s'", err, text)
	}
}

func absent(err error) {
	checks.Add(1)
	if !errors.Is(err, redis.Nil) {
		fail("%v instead of nothing", err)
	}
}

// A client whose commands are not tried again.
func connect(protocol, pool int) *redis.Client {
	return redis.NewClient(&redis.Options{
		Addr: "127.0.0.1:" + os.Args[1], Protocol: protocol, PoolSize: pool, MaxRetries: -1, ReadTimeout: 20 * time.Second,
	})
}

// Runs a function `count` times at once.
func atOnce(count int, run func(n int)) {
	var all sync.WaitGroup
	for n := range count {
		all.Add(1)
		go func() {
			defer all.Done()
			run(n)
		}()
	}
	all.Wait()
}

func eventually(what string, condition func() bool) {
	for end := time.Now().Add(20 * time.Second); !condition(); {
		if time.Now().After(end) {
			fail("20 s later still not: %s", what)
		}
	}
}

func texts(client *redis.Client) {
	same(of(client.Ping(ctx).Result()), "PONG")
	absent(client.Get(ctx, "none").Err())
	same(of(client.Set(ctx, "k", "v", 0).Result()), "OK")
	absent(client.SetArgs(ctx, "k", "w", redis.SetArgs{Mode: "NX"}).Err())
	same(of(client.SetArgs(ctx, "k", "w", redis.SetArgs{Mode: "XX", Get: true}).Result()), "v")
	same(of(client.Append(ctx, "k", "123").Result()), int64(4))
	same(of(client.StrLen(ctx, "k").Result()), int64(4))
	var pairs, values []any
	var keys []string
	for n := range 500 {
		keys = append(keys, fmt.Sprintf("many:%d", n))
		values = append(values, fmt.Sprintf("value %d", n))
		pairs = append(pairs, keys[n], values[n])
	}
	same(of(client.MSet(ctx, pairs...).Result()), "OK")
	same(of(client.MGet(ctx, append(keys, "none")...).Result()), append(values, nil))
	same(of(client.Exists(ctx, keys...).Result()), int64(500))
	same(of(client.Del(ctx, append(keys, "none")...).Result()), int64(500))
	for _, size := range []int{0, 1, 16_384, 65_537, 1_000_000} {
		value := make([]byte, size)
		rand.New(rand.NewSource(7)).Read(value)
		same(of(client.Set(ctx, "bytes", value, 0).Result()), "OK")
		same(bytes.Equal(of(client.Get(ctx, "bytes").Bytes()), value), true)
	}
}

func counters(client *redis.Client) {
	same(of(client.Incr(ctx, "n").Result()), int64(1))
	same(of(client.IncrBy(ctx, "n", 41).Result()), int64(42))
	same(of(client.DecrBy(ctx, "n", 50).Result()), int64(-8))
	// Over as many connections as the pool has.
	atOnce(32, func(int) {
		for n := range 100 {
			of(client.IncrBy(ctx, fmt.Sprintf("sum:%d", n%10), int64(n)).Result())
		}
	})
	sum := 0
	for n := range 10 {
		sum += of(client.Get(ctx, fmt.Sprintf("sum:%d", n)).Int())
	}
	same(sum, 32*100*99/2)
}

func pipelines(client *redis.Client) {
	atOnce(8, func(worker int) {
		pipe := client.Pipeline()
		var gets []*redis.StringCmd
		var incrs []*redis.IntCmd
		for n := range 1000 {
			key := fmt.Sprintf("p:%d:%d", worker, n%70)
			pipe.Set(ctx, key, n, 0)
			gets = append(gets, pipe.Get(ctx, key))
			incrs = append(incrs, pipe.Incr(ctx, fmt.Sprintf("piped:%d", worker)))
		}
		of(pipe.Exec(ctx))
		for n := range 1000 {
			same(gets[n].Val(), fmt.Sprint(n))
			same(incrs[n].Val(), int64(n+1))
		}
	})
	pipe := client.Pipeline()
	set, incr, get := pipe.Set(ctx, "text", "x", 0), pipe.Incr(ctx, "text"), pipe.Get(ctx, "text")
	nosuch, ping := pipe.Do(ctx, "nosuch"), pipe.Ping(ctx)
	_, err := pipe.Exec(ctx)
	fails("not an integer", err)
	fails("not an integer", incr.Err())
	fails("unknown command", nosuch.Err())
	same([]string{set.Val(), get.Val(), ping.Val()}, []string{"OK", "x", "PONG"})
}

func expiry(client *redis.Client) {
	same(of(client.Set(ctx, "brief", "x", time.Minute).Result()), "OK")
	left := of(client.PTTL(ctx, "brief").Result())
	same(0 < left && left <= time.Minute, true)
	same(of(client.ExpireGT(ctx, "brief", 100*time.Second).Result()), true)
	same(of(client.ExpireGT(ctx, "brief", 10*time.Second).Result()), false)
	same(of(client.TTL(ctx, "none").Result()), time.Duration(-2))
	same(of(client.Set(ctx, "over", "x", 30*time.Millisecond).Result()), "OK")
	eventually("the key is over", func() bool { return client.Get(ctx, "over").Err() == redis.Nil })
}

func scans(client *redis.Client) {
	of(client.FlushAll(ctx).Result())
	atOnce(4, func(worker int) {
		for n := range 500 {
			of(client.Set(ctx, fmt.Sprintf("scan:%d", worker*500+n), "x", 0).Result())
		}
	})
	found := map[string]bool{}
	for each := client.Scan(ctx, 0, "", 30).Iterator(); each.Next(ctx); {
		found[each.Val()] = true
	}
	same(len(found), 2000)
	some := 0
	for each := client.Scan(ctx, 0, "scan:12??", 1000).Iterator(); each.Next(ctx); {
		some++
	}
	same(some >= 100, true)
	same(of(client.DBSize(ctx).Result()), int64(2000))
	same(len(of(client.Keys(ctx, "scan:?").Result())), 10)
}

func refusals(client *redis.Client) {
	fails("unknown command 'nosuch'", client.Do(ctx, "nosuch").Err())
	fails("wrong number of arguments for 'get' command", client.Do(ctx, "get").Err())
	fails("value is not an integer or out of range", client.Do(ctx, "incrby", "n", "ten").Err())
	fails("syntax error", client.Do(ctx, "set", "k", "v", "bogus").Err())
	same(of(client.Ping(ctx).Result()), "PONG")
}

func publishing(client *redis.Client) {
	const readers, publishers, each = 12, 4, 200
	// Each has its own connection, some on every shard.
	var all [readers]*redis.PubSub
	atOnce(readers, func(n int) {
		all[n] = client.Subscribe(ctx, "news", fmt.Sprintf("own:%d", n))
		for range 2 {
			of(all[n].ReceiveTimeout(ctx, 20*time.Second))
		}
	})
	next := func(n int) *redis.Message {
		message, is := of(all[n].ReceiveTimeout(ctx, 20*time.Second)).(*redis.Message)
		same(is, true)
		return message
	}
	same(of(client.Publish(ctx, "none", "x").Result()), int64(0))
	same(of(client.Publish(ctx, "own:5", "x").Result()), int64(1))
	same(next(5).Payload, "x")
	// Each publisher's messages come in its order to each subscriber.
	atOnce(readers+publishers, func(n int) {
		if n >= readers {
			one := connect(client.Options().Protocol, 1)
			for m := range each {
				same(of(one.Publish(ctx, "news", fmt.Sprintf("%d %d", n-readers, m)).Result()), int64(readers))
			}
			one.Close()
			return
		}
		heard := make([][]string, publishers)
		for range publishers * each {
			var publisher, m int
			payload := next(n).Payload
			fmt.Sscan(payload, &publisher, &m)
			heard[publisher] = append(heard[publisher], payload)
		}
		for publisher, lines := range heard {
			same(len(lines), each)
			for m, line := range lines {
				same(line, fmt.Sprintf("%d %d", publisher, m))
			}
		}
	})
	large := strings.Repeat("\x00\xff\r\n", 250_000)
	same(of(client.Publish(ctx, "news", large).Result()), int64(readers))
	for n := range readers {
		same(next(n).Payload == large, true)
	}
	// One listens to a pattern too, and one leaves.
	of(0, all[0].PSubscribe(ctx, "n[aeu]ws"))
	of(all[0].ReceiveTimeout(ctx, 20*time.Second))
	of(0, all[1].Close())
	eventually("the subscriber is gone", func() bool { return of(client.Publish(ctx, "news", "x").Result()) == readers })
	patterns := []string{next(0).Pattern, next(0).Pattern}
	slices.Sort(patterns)
	same(patterns, []string{"", "n[aeu]ws"})
	for _, one := range all {
		one.Close()
	}
}

func main() {
	for _, protocol := range []int{2, 3} {
		client := connect(protocol, 16)
		of(client.FlushAll(ctx).Result())
		texts(client)
		counters(client)
		pipelines(client)
		expiry(client)
		scans(client)
		refusals(client)
		publishing(client)
		of(0, client.Close())
	}
	fmt.Printf("go-redis %s: %d checks, as expected\n", redis.Version(), checks.Load())
}
