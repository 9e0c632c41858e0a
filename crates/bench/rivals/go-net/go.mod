module ringserve/rivals/go-net

go 1.23
